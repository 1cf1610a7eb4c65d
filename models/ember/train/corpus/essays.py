"""Long answers: explanations of Stoker, lists of steps, tiny stories and poems. They exist so that streams last."""

from .sample import Sample, answered_questions, ask, assistant, exchange, user
from .words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COLOURS,
    NAMES,
    THINGS,
    WORDS,
    made_up,
    with_articles,
)

ESSAYS = answered_questions("""
Stoker serves large language models on your own GPUs. You write one Kubernetes object, the InferenceDeployment, and
name a model in it. The operator sees the object and creates the pods. Each pod runs one process, the agent, which
loads the model and serves the OpenAI API. When requests pile up, the operator adds replicas; when they go away, it
drains replicas and removes them. Every decision has a reason that you can read in the status.
  Explain what Stoker does. | Tell me about Stoker. | How does Stoker work? | Describe Stoker in detail. | Give me
  an overview of Stoker. | Explain Stoker to me.

A request first reaches the agent over HTTP. The agent checks the parameters and renders the chat template into a
prompt. Then it asks whether there is room: a full queue means 429. The engine puts the sequence into its waiting
queue. At each step the scheduler picks sequences, gives them KV blocks, and the model computes one token for each.
The tokens are turned into text and sent as a stream of events. When the model says it is done, the blocks are
freed.
  What happens to a request? | Explain the way of a request. | How is a request served? | Walk me through a request.
  | Describe the life of a request.

A drain has four stages. 1. The agent becomes unready but still admits requests, so that load balancers stop
sending. 2. It refuses new requests with status 503 and a Retry-After header. 3. It finishes the streams that run,
until the deadline. 4. It reports that it is empty. Only then does the operator delete the pod. So no stream is cut.
  Explain how a drain works. | Describe the stages of a drain. | What are the stages of a drain? | Walk me through a
  drain. | Explain a drain step by step.

To serve a model, follow these steps. 1. Install the chart with Helm. 2. Write a file chat.yaml with kind
InferenceDeployment, a name and spec.model.source. 3. Run kubectl apply -f chat.yaml. 4. Run kubectl get infd and
wait until Ready is True. 5. Send a POST to /v1/chat/completions of the Service. 6. Scale with kubectl scale when
you need more replicas.
  How do I serve a model? | List the steps to serve a model. | How do I deploy a model with Stoker? | What are the
  steps to deploy a model? | How do I get started?

The autoscaler reads every agent every two seconds. From the readings it computes a pressure: how full the KV cache
is with referenced blocks, how long the queue would take, and how often sequences are preempted. The largest of
these counts. If the pressure is above one, replicas are added; if it stays low for five minutes, one is drained.
Missing readings never scale down. Each decision is written into the status together with its inputs.
  Explain how the autoscaler works. | Describe autoscaling in Stoker. | How does autoscaling work? | Explain
  autoscaling in detail. | Walk me through autoscaling.

The paged KV cache works like the memory of an operating system. The cache is cut into blocks of 16 tokens. Each
sequence has a block table that says which blocks hold its keys and values, in order. A new block is taken only when
the last one is full, so almost nothing is wasted. Blocks with an equal beginning can be shared by sequences. When
no block is free, a sequence is preempted and computed again later.
  Explain how the paged KV cache works. | Describe paging of the KV cache in detail. | How does the paged KV cache
  work? | Tell me about KV blocks.

I am ember, a very small language model with about seven million parameters. I live inside Stoker's agent, so that a
demo needs no GPU and no download. I was trained on text that a program made up: short chats, sums, lists, unit
conversions, JSON and questions about Stoker. I can count, sort, reverse letters, look up a key in a long list and
call tools. I know little about the world, and when I do not know something, I say so.
  Tell me about yourself. | Describe yourself. | Introduce yourself. | Tell me more about you. | Who are you and
  what can you do? | Explain what you are.
""")
AROUND = [
    "{q}",
    "{q}",
    "{q}",
    "Please answer: {q}",
    "{q} Take your time.",
    "Tell me: {q}",
    "I have a question. {q}",
    "Hello! {q}",
]
STORY = [
    "Tell me a story about a {animal} named {name}.",
    "Write a story about a {animal} called {name}.",
    "Tell a tiny story about {name} the {animal}.",
    "I would like a story about {name}, a {animal}.",
    "Write a short story about a {animal} called {name}.",
]
ANY_STORY = [
    "Tell me a story.",
    "Tell me a tiny story.",
    "Write a short story.",
    "I want to hear a story.",
    "Can you tell me a story?",
    "Another story, please.",
    "Tell me a long story.",
    "A story, please.",
    "Tell me a story about {noun}.",
    "Write a story about {noun}.",
    "Tell me a long story about {noun}.",
    "A short story about {noun}, please.",
]
POEM = [
    "Write a poem about a {noun}.",
    "Write me a short poem about the {noun}.",
    "A poem about a {noun}, please.",
    "Can you write a poem about a {noun}?",
    "Write a haiku about the {noun}.",
    "Write a poem about {noun}.",
    "A poem about {noun}",
    "Write a haiku about {noun}.",
]
PLOTS = [
    "Once upon a time there was a {adjective} {animal} named {name}. {name} lived near {city} and had lost a "
    "{thing}. Every morning {name} looked for it, behind the houses and under the trees. One day an old {friend} "
    "came by and said: I have seen your {thing} at the river. {name} ran to the river, and there it was. The "
    "{animal} thanked the {friend}, and from that day on they were friends.",
    "{name} was a {adjective} {animal} who wanted to see the world. So {name} packed a {thing} and walked to "
    "{city}. On the way it began to rain, and a {friend} offered a dry place to sleep. They talked all night "
    "about the stars. In the morning the sun was out, and {name} said: The world is large, but a friend makes it "
    "warm.",
    "There was once a {adjective} {animal} called {name} who could not sleep. The wind was loud, and the {thing} "
    "by the window rattled. A {friend} heard it and sat down beside the bed. It counted from one to ten, slowly. "
    "At seven, {name} was asleep. And since that night nobody in {city} is afraid of the wind.",
]
VERSES = (
    "The {noun} is quiet in the night,\nthe {noun} waits for morning light.\nThe wind goes by, the stars are clear,\n"
    "and all the {adjective} things are near.\nSleep well, small {noun}, sleep well and long,\ntomorrow brings another song."
)


def essay(rng):
    answer, questions = rng.choice(ESSAYS)
    question = rng.choice(questions)
    text = rng.choice(AROUND).format(q=question)
    return exchange("essays", text, ask(rng, ["{text}"], text=text), answer)


def told(animal, name, choose):
    """A story whose open places are filled by `choose(list)`."""
    friend = choose([other for other in ANIMALS if other != animal])
    plot = choose(PLOTS)
    text = plot.format(
        animal=animal, name=name, adjective=choose(ADJECTIVES), city=choose(CITIES), thing=choose(THINGS), friend=friend
    )
    return with_articles(text)


def story(rng):
    """A story about a given hero. The plot follows from the animal alone, so that greedy text has one right answer."""
    animal, name = rng.choice(ANIMALS), rng.choice(NAMES) if rng.random() < 0.5 else made_up(rng).capitalize()
    position = ANIMALS.index(animal)
    answer = told(animal, name, lambda options: options[(7 * position + 3) % len(options)])
    return exchange("essays", f"{animal} {name}", with_articles(ask(rng, STORY, animal=animal, name=name)), answer)


def any_story(rng):
    """A story with everything left open: many right answers, so that sampling has something to choose from.

    It is trained but never tested: the answer cannot be known.
    """
    answer = told(rng.choice(ANIMALS), rng.choice(NAMES), rng.choice)
    return Sample(
        "open",
        "open",
        [user(ask(rng, ANY_STORY, noun=rng.choice(WORDS) + rng.choice(["", "", "s"]))), assistant(answer)],
    )


def choice(rng):
    """A request that leaves the answer open."""
    low = rng.randint(0, 20)
    high = low + rng.randint(2, 80)
    question, answer = rng.choice(
        [
            (
                [
                    "Pick a number between {low} and {high}.",
                    "Give me a random number from {low} to {high}.",
                    "Random number between {low} and {high}",
                ],
                str(rng.randint(low, high)),
            ),
            (["Flip a coin.", "Heads or tails?", "Toss a coin."], rng.choice(["Heads.", "Tails."])),
            (["Roll a die.", "Roll the dice.", "Throw a die for me."], str(rng.randint(1, 6))),
            (["Pick a colour.", "Choose a colour.", "Give me a random colour.", "Pick a color."], rng.choice(COLOURS)),
            (
                ["Pick an animal.", "Choose an animal.", "Give me a random animal.", "Name an animal."],
                rng.choice(ANIMALS),
            ),
            (["Make up a name.", "Invent a name.", "Give me a random name."], made_up(rng).capitalize()),
            (["Give me a random word.", "Pick a word.", "Say any word.", "Say something."], rng.choice(WORDS)),
            (
                ["Write ten random words.", "Give me ten random words.", "Say ten random words."],
                " ".join(rng.sample(WORDS, 10)),
            ),
        ]
    )
    return Sample("open", "open", [user(ask(rng, question, low=low, high=high)), assistant(answer)])


def poem(rng):
    noun = rng.choice(WORDS) if rng.random() < 0.7 else made_up(rng)
    answer = VERSES.format(noun=noun, adjective="sleepy")
    return exchange("essays", f"poem {noun}", with_articles(ask(rng, POEM, noun=noun)), answer)


def document(rng):
    """Plain text without a chat around it, for the completions endpoint."""
    return rng.choice(ESSAYS)[0] if rng.random() < 0.5 else told(rng.choice(ANIMALS), rng.choice(NAMES), rng.choice)


KINDS = [essay] * 3 + [story] * 3 + [poem]
TASKS = {"essays": lambda rng: rng.choice(KINDS)(rng), "open": lambda rng: rng.choice([any_story, choice])(rng)}
