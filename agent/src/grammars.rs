//! Compiles grammars for requests: off the threads that serve connections, a few at a time, within a time. The engine's
//! own thread never compiles. Knows no field of a request.

use std::{
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use stoker_engine::{
    EngineHandle,
    constraint::Constraint,
    grammar::{GrammarCompiler, GrammarError, GrammarSpec, Source},
};
use tokio::sync::Semaphore;

/// Grammars compiled at once; more wait in line.
const N_PLACES: usize = 2;
/// A request whose grammar takes longer is refused. Real schemas take milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);

/// The compiler of the model that is served, made when first needed.
#[derive(Clone, Default)]
pub struct Grammars {
    compiler: Arc<OnceLock<Result<GrammarCompiler, GrammarError>>>,
    places: Arc<Places>,
}

struct Places(Semaphore);

impl Default for Places {
    fn default() -> Self {
        Self(Semaphore::new(N_PLACES))
    }
}

/// A grammar and what it took.
#[derive(Clone, Debug)]
pub struct Ready {
    /// The grammar.
    pub constraint: Constraint,
    /// Where it came from.
    pub source: Source,
    /// Time from the question to the answer.
    pub took: Duration,
}

/// Why a request gets no grammar.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum NoGrammar {
    /// It is refused.
    #[error(transparent)]
    Refused(#[from] GrammarError),
    /// It takes too long.
    #[error("it was not compiled within {} s: send a simpler one", PATIENCE.as_secs())]
    TooSlow,
}

impl Grammars {
    /// Bytes that all of them hold, about.
    pub fn held_bytes(&self) -> usize {
        let compiler = self.compiler.get().and_then(|compiler| compiler.as_ref().ok());
        compiler.map_or(0, GrammarCompiler::held_bytes)
    }

    /// The grammar that `spec` asks for.
    pub async fn compile(&self, engine: &EngineHandle, spec: GrammarSpec) -> Result<Ready, NoGrammar> {
        let began = Instant::now();
        // A thread that is past its time keeps its place: so many compile at most, whatever is sent.
        let compiled = async {
            let place = Arc::clone(&self.places);
            let permit = self.places.0.acquire().await.expect("the line is never closed");
            permit.forget();
            let (compiler, engine) = (Arc::clone(&self.compiler), engine.clone());
            let compiling = tokio::task::spawn_blocking(move || {
                let _leaving = Leaving(place);
                let compiler = compiler.get_or_init(|| GrammarCompiler::new(engine.tokenizer(), &engine.model().eos));
                compiler.as_ref().map_err(Clone::clone)?.compile(&spec)
            });
            let panicked = |_| GrammarError::Refused("compiling it failed".into());
            compiling.await.map_err(panicked)?
        };
        let (constraint, source) = tokio::time::timeout(PATIENCE, compiled).await.map_err(|_| NoGrammar::TooSlow)??;
        Ok(Ready { constraint, source, took: began.elapsed() })
    }
}

/// Gives the place back when the thread is done, however it ends.
struct Leaving(Arc<Places>);

impl Drop for Leaving {
    fn drop(&mut self) {
        self.0.0.add_permits(1);
    }
}
