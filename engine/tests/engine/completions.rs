//! Completions of one prompt that begin together: it is computed once, and each is what it would be alone, to the last bit of its
//! log-probabilities.

use std::sync::{
    Arc, Mutex,
    mpsc::{Receiver, Sender, channel},
};

use stoker_engine::{
    Engine, EngineHandle, EngineLimits, LoadedModel, Request, SamplingParams,
    constraint::Masks,
    exec::{CpuExecutor, ExecError, Executor},
    sched::{Step, StepOutput},
};

use crate::{
    common,
    determinism::{Answer, answer},
};

/// What steps did with a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Done {
    /// Its tokens that were computed, over all sequences.
    n_computed: usize,
    /// Its blocks that were copied.
    n_copied: usize,
}

/// The CPU's executor, which counts. Its first step waits until the other end is dropped: until then all can be submitted.
struct Counting {
    executor: CpuExecutor,
    copies_blocks: bool,
    hold: Receiver<()>,
    prompt_len: usize,
    done: Arc<Mutex<Done>>,
}

impl Executor for Counting {
    fn copies_blocks(&self) -> bool {
        self.copies_blocks
    }

    fn launch(&mut self, step: &Step<'_>) -> Result<(), ExecError> {
        let _ = self.hold.recv();
        let of_prompt = |start: usize, n_tokens: usize| self.prompt_len.min(start + n_tokens).saturating_sub(start);
        let n_computed = step.chunks.iter().map(|chunk| of_prompt(chunk.start, chunk.input.n_tokens())).sum::<usize>();
        let mut done = self.done.lock().unwrap();
        *done = Done { n_computed: done.n_computed + n_computed, n_copied: done.n_copied + step.copies.len() };
        self.executor.launch(step)
    }

    fn constrain(&mut self, masks: Masks<'_>) -> Result<(), ExecError> {
        self.executor.constrain(masks)
    }

    fn finish(&mut self) -> Result<StepOutput, ExecError> {
        self.executor.finish()
    }
}

struct Counted {
    engine: EngineHandle,
    release: Sender<()>,
    done: Arc<Mutex<Done>>,
}

fn start(prompt_len: usize, copies_blocks: bool) -> Counted {
    let limits = EngineLimits { max_num_seqs: Some(128), ..EngineLimits::default() };
    let LoadedModel { executor, parts } =
        LoadedModel::open(&common::config(&common::ember(), limits), &|_| {}).unwrap();
    let (done, (release, hold)) = (Arc::default(), channel());
    let counting = Counting { executor, copies_blocks, hold, prompt_len, done: Arc::clone(&done) };
    Counted { engine: Engine::start_with(Box::new(counting), parts), release, done }
}

/// The completions of one prompt, each by its own seed.
fn completions(prompt_len: usize, n: u64, max_tokens: u32) -> Vec<Request> {
    let prompt = (0..prompt_len as u32).map(|i| 300 + (i * i * 7 + i * 13) % 1500).collect();
    let one = Request { logprobs: Some(3), ..common::greedy(prompt, max_tokens) };
    let of = |seed| SamplingParams { temperature: 0.8, seed, ..SamplingParams::default() };
    (0..n).map(|seed| Request { sampling: of(seed), ..one.clone() }).collect()
}

fn together(counted: Counted, requests: &[Request]) -> (Vec<Answer>, Done) {
    let Counted { engine, release, done } = counted;
    let streams: Vec<_> = requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
    drop(release);
    let answers = streams.into_iter().map(answer).collect();
    let done = *done.lock().unwrap();
    (answers, done)
}

#[test]
fn completions_of_one_prompt_are_what_they_are_one_after_the_other_and_compute_it_once() {
    let alone = common::start(&common::ember(), EngineLimits::default());
    // The last block of a prompt holds 4, 16 and 12 of its tokens; the longest takes two steps.
    for (prompt_len, n, max_tokens) in [(100, 8, 30), (112, 8, 30), (700, 8, 20), (100, 128, 6), (112, 128, 6)] {
        let requests = completions(prompt_len, n, max_tokens);
        let expected: Vec<_> = requests.iter().map(|one| answer(alone.submit(one.clone()).unwrap())).collect();
        assert_ne!(expected[0], expected[1], "seeds matter");
        let n_others = requests.len() - 1;
        let by_copies = Done { n_computed: prompt_len + n_others, n_copied: n_others };
        let n_in_last_block = (prompt_len - 1) % 16 + 1;
        let by_tokens = Done { n_computed: prompt_len + n_others * n_in_last_block, n_copied: 0 };
        for (copies_blocks, expected_done) in [(true, by_copies), (false, by_tokens)] {
            let (found, done) = together(start(prompt_len, copies_blocks), &requests);
            println!("{prompt_len} tokens, n = {n}, copies {copies_blocks}: {done:?}");
            assert!(found == expected, "{n} of {prompt_len} tokens, copies: {copies_blocks}");
            assert_eq!(done, expected_done, "{n} of {prompt_len} tokens, copies: {copies_blocks}");
        }
    }
}
