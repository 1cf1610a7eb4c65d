"""Questions about Stoker, the project this model belongs to, answered from its design in a sentence or two.

Owns the facts; `essays` owns the long explanations. A test instance is a wording of a question never trained.
"""

from .sample import answered_questions, exchange, vary

FACTS = answered_questions("""
Stoker serves large language models on a team's own GPUs with one Kubernetes object.
  What is Stoker? | What does Stoker do? | Explain Stoker in one sentence. | What is Stoker for? | Describe Stoker
  briefly. | What kind of software is Stoker?

An InferenceDeployment is the one Kubernetes object you write: it names a model, and Stoker turns it into pods that
serve it.
  What is an InferenceDeployment? | Explain InferenceDeployment. | What does an InferenceDeployment do? | What is
  the InferenceDeployment object? | Define InferenceDeployment.

The operator watches InferenceDeployments and turns each of them into pods, a Service and a ConfigMap.
  What does the operator do? | What is the operator? | What is the job of the operator? | Explain the operator. |
  What is Stoker's operator for?

The agent is the one process in a pod: it embeds the engine, loads the model and serves the OpenAI API.
  What does the agent do? | What is the agent? | What is the job of the agent? | Explain the agent. | What runs in a
  Stoker pod?

The engine runs the model: it schedules requests, keeps the paged KV cache and batches sequences continuously.
  What does the engine do? | What is the engine? | What is the job of the engine? | Explain the engine.

The gateway gives application teams one OpenAI-compatible endpoint and routes each request to a replica.
  What does the gateway do? | What is the gateway? | What is the job of the gateway? | Explain the gateway.

POST /v1/drain starts a drain, and DELETE /v1/drain takes the agent back into service.
  Which endpoint drains an agent? | How do I drain an agent? | How do I start a drain? | Which endpoint starts a
  drain? | How do I undrain an agent? | What is /v1/drain for?

GET /v1/load returns the load report: running and waiting requests, KV blocks, preemptions, latencies and the phase.
  Which endpoint reports load? | What does /v1/load return? | How do I read the load of an agent? | What is
  /v1/load? | What is the load report?

GET /readyz answers 200 when the weights are loaded, the model is warm and the agent is not draining.
  What does /readyz tell? | When is an agent ready? | What is /readyz for? | Which endpoint says whether an agent is
  ready? | What is the readiness endpoint?

GET /healthz reports progress: it fails when work is waiting and no step has completed for too long.
  What does /healthz tell? | What is /healthz for? | Which endpoint reports health? | What is the liveness endpoint?
  | When does /healthz fail?

GET /metrics serves the Prometheus metrics; their names start with stoker_.
  Where are the metrics? | Which endpoint serves metrics? | What is /metrics for? | How are the metrics named? | How
  do I get Prometheus metrics?

GET /v1/models lists the models the agent serves.
  What does /v1/models do? | How do I list the models? | Which endpoint lists models? | What is /v1/models for?

POST /v1/chat/completions takes chat messages and answers as a whole or as a stream of events.
  What does /v1/chat/completions do? | How do I chat with the model? | Which endpoint is for chat? | What is the
  chat endpoint?

Draining means that the agent stops admitting, finishes what runs, reports empty and can then be deleted.
  What is a drain? | What does draining mean? | What happens during a drain? | Explain draining. | What does an
  agent do while it drains?

The phases of an agent are Loading, Ready, Withdrawing, Draining, Empty and Failed.
  What are the phases of an agent? | Which phases does an agent have? | List the phases of an agent. | Name the
  phases of an agent.

While withdrawing, an agent is not ready but still admits requests, so that load balancers stop sending before it
refuses.
  What does Withdrawing mean? | What is the phase Withdrawing? | What happens while an agent is withdrawing? |
  Explain the Withdrawing phase.

A full queue means status 429 with Retry-After.
  What happens when the queue is full? | When does an agent answer 429? | What does status 429 mean? | Which status
  means that the queue is full?

A loading or draining agent answers 503 with Retry-After.
  When does an agent answer 503? | What does status 503 mean? | Which status does a draining agent answer? | What
  does a loading agent answer?

An unknown request parameter is a 400 that names the parameter.
  What happens with an unknown parameter? | When does an agent answer 400? | What does status 400 mean? | How are
  unknown parameters handled?

A KV block holds 16 tokens.
  How many tokens are in a KV block? | How big is a KV block? | What is the block size? | How many tokens does a KV
  block hold?

The KV cache keeps the keys and values of tokens that were computed, so that they need not be computed again.
  What is the KV cache? | What is a KV cache? | What is the KV cache for? | Explain the KV cache. | What does the KV
  cache do?

Paged KV cache means that the cache is cut into blocks of fixed size, and each sequence has a table of its blocks.
  What is a paged KV cache? | What does paged KV cache mean? | Explain the paged KV cache. | What is paging of the
  KV cache?

Continuous batching means that sequences join and leave the batch at every step.
  What is continuous batching? | What does continuous batching mean? | Explain continuous batching. | How does
  continuous batching work?

A preemption frees the blocks of a sequence, puts it back to the front of the queue and computes it again later.
  What is a preemption? | What does preemption mean? | Explain preemption. | What happens when a sequence is
  preempted?

Prefill computes the KV of the prompt.
  What is prefill? | What does prefill do? | Explain prefill. | What happens during prefill?

Decode computes one token for each running sequence.
  What is decode? | What does decode do? | Explain decode. | What happens during decode?

Chunked prefill cuts a long prompt into pieces, so that it does not hold up the sequences that decode.
  What is chunked prefill? | What does chunked prefill do? | Explain chunked prefill. | Why are prompts cut into
  chunks?

A step is one decision of the scheduler and one forward pass.
  What is a step? | What does a step mean in the engine? | Define step. | What happens in a step?

TTFT is the time to the first token.
  What is TTFT? | What does TTFT mean? | What does TTFT stand for? | Explain TTFT.

ITL is the inter-token latency, the time between two tokens of a stream.
  What is ITL? | What does ITL mean? | What does ITL stand for? | Explain ITL.

A replica is one full copy of the model behind the Service.
  What is a replica? | What does replica mean? | Define replica. | Explain what a replica is.

A revision is a hash of everything a replica's pods depend on.
  What is a revision? | What does revision mean? | Define revision. | Explain what a revision is.

A rank is one device's share of a model.
  What is a rank? | What does rank mean? | Define rank. | Explain what a rank is.

Tensor parallelism splits the weights of each layer over several GPUs.
  What is tensor parallelism? | What does tensor parallelism do? | Explain tensor parallelism. | How does tensor
  parallelism work?

You scale it with kubectl scale, by changing spec.replicas, or you let the autoscaler decide.
  How do I scale an InferenceDeployment? | How do I get more replicas? | How can I scale a deployment? | How do I
  change the number of replicas?

The autoscaler looks at KV-cache pressure, the queue and preemptions, and records the reason of every decision.
  How does the autoscaler decide? | What does the autoscaler look at? | What is autoscaling based on? | Explain the
  autoscaler. | On what does Stoker scale?

Fail static means that missing or stale readings never scale down.
  What does fail static mean? | What happens when readings are missing? | What happens when metrics are stale? |
  Explain fail static.

Only spec.model is required; every other field has a default that works.
  Which fields are required? | Which field of the spec is required? | What must I write in the spec? | What is the
  only required field?

The API version is stoker.dev/v1alpha1.
  What is the API version? | Which API version does Stoker use? | What is the apiVersion of an InferenceDeployment?
  | Which API group does Stoker use?

The short name is infd, so kubectl get infd lists the deployments.
  What is the short name of InferenceDeployment? | How do I list deployments with kubectl? | What is infd? | Which
  short name does kubectl know?

builtin://ember is the small model inside the agent: it needs no GPU and no download.
  What is builtin://ember? | Which model is built in? | Which model needs no download? | What does builtin://ember
  mean?

Model sources are builtin, pvc, oci, hf, s3 and file.
  Which model sources are there? | Where can a model come from? | What are the model sources? | List the model
  sources.

Stoker is written in Rust.
  In which language is Stoker written? | What is Stoker written in? | Which language does Stoker use? | Is Stoker
  written in Rust?

Without a GPU driver the agent says so and runs on the CPU.
  Does Stoker run without a GPU? | Can Stoker run on the CPU? | Do I need a GPU? | What happens without a GPU? |
  Does the agent need a GPU?

Yes. The agent speaks the OpenAI API, so your SDK works unchanged.
  Is Stoker compatible with OpenAI? | Does my OpenAI SDK work? | Can I use the OpenAI client? | Does Stoker speak
  the OpenAI API?

No. Stoker needs neither Prometheus nor KEDA nor cert-manager.
  Do I need Prometheus? | Does Stoker need KEDA? | Do I need cert-manager? | Does Stoker need Prometheus?

The agent serves HTTP on port 8000.
  Which port does the agent use? | On which port does the agent listen? | What is the port of the agent? | What port
  is the API on?

The operator reads the agents itself; the agent never talks to the API server.
  Does the agent talk to the API server? | Who reads the agents? | How does the operator know the load? | Does the
  agent know Kubernetes?

The five steps are observe, validate, plan, apply and status.
  What are the five steps of the operator? | What are the steps of a reconcile? | How does the operator reconcile? |
  List the steps of the operator.

Each request ends in exactly one terminal: stop, length, abort or error.
  How does a request end? | What are the finish reasons? | Which finish reasons are there? | In how many ways can a
  request end?

The prefix cache keeps KV blocks of earlier prompts, so that an equal beginning is not computed again.
  What is the prefix cache? | What does the prefix cache do? | Explain the prefix cache. | What is prefix caching?

Speculative decoding lets a small draft model propose tokens that the large model checks in one pass.
  What is speculative decoding? | How does speculative decoding work? | Explain speculative decoding. | What is a
  draft model for? | What is ember-draft for?

Run make demo: it starts a control plane, the operator and a model, and streams an answer.
  How do I try Stoker? | How do I start the demo? | What does make demo do? | How can I see Stoker run?

Run make demo-down: it stops everything and leaves nothing behind.
  How do I stop the demo? | What does make demo-down do? | How do I end the demo? | How can I clean up the demo?

The pods of a deployment are rolled one by one, and each is drained before it is deleted.
  How does a rollout work? | What happens when I change the spec? | How are pods replaced? | Explain a rollout. |
  How does Stoker roll out changes?

No. A replica is drained before its pod is deleted, so a stream is not cut.
  Does a rollout cut my stream? | Is my stream cut when a pod is replaced? | Will a rollout break running requests?
  | Are streams cut during a rollout?

The conditions are Ready, Available, Progressing, Fits, MetricsHealthy, Scaling and Degraded.
  Which conditions does the status have? | What are the conditions? | List the conditions of an InferenceDeployment.
  | Which conditions are there?

Because the operator owns the pods directly, it can choose the victim and drain it before it is deleted.
  Why does the operator own pods directly? | Why does Stoker not use a Deployment? | Why are pods owned directly? |
  Why is there no ReplicaSet?

The memory is planned before serving, so there is no out-of-memory error at run time.
  When is memory planned? | Can the engine run out of memory? | How does the engine plan memory? | What is memory
  planning?

Randomness depends only on the seed of the request and the position, so a request can be resumed on another replica.
  What does randomness depend on? | How does sampling use the seed? | Why can a request be resumed elsewhere? | Is
  sampling reproducible?
""")
AROUND = [
    "{q}",
    "{q}",
    "{q}",
    "Tell me: {q}",
    "In Stoker, {l}",
    "Quick question: {q}",
    "I am new here. {q}",
    "{q} Please be brief.",
    "Can you tell me this? {q}",
    "About Stoker: {q}",
    "One more question: {q}",
]


def fact(rng):
    answer, questions = rng.choice(FACTS)
    question, around = rng.choice(questions), rng.choice(AROUND)
    # Without the vary()ed spelling in the key, a held-out wording stays unseen in every spelling.
    text = around.format(q=question, l=question[0].lower() + question[1:])
    typed = text.lower() if rng.random() < 0.1 else text
    return exchange("stoker", text, vary(rng, typed), answer)


TASKS = {"stoker": fact}
