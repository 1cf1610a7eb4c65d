//! An answer that outlives its replica: what was told of it goes to another one, which goes on behind it. The client gets the bytes
//! that it would have got; it only waits a little.

use std::sync::Arc;

use axum::http::{HeaderMap, HeaderName, StatusCode};
use bytes::Bytes;

use crate::{
    asked::Asked,
    attempt::{Answered, Attempt, Silence, attempt},
    error::GatewayError,
    gateway::Gateway,
    journal::Journal,
    search::{Loss, Losses, Patience, Rounds},
    vital::{DEAD, Flight, Life},
};

/// How an agent names the vocabulary of the tokens it tells, and the bits of its logits: `VOCABULARY-BITS`.
pub const MODEL: HeaderName = HeaderName::from_static("x-stoker-model");

/// An answer that can go on elsewhere.
pub struct Resumable {
    gateway: Arc<Gateway>,
    /// The request; `None` where too many are kept already, or only this replica can answer it.
    kept: Option<Arc<Asked>>,
    /// `NAME.NAMESPACE` of the deployment.
    host: String,
    /// Whose replica answers, by its slot.
    slot: u32,
    model: Model,
    /// What the client has, or will have when all of it is there.
    pub journal: Journal,
    /// Replicas that were lost in a row, and the tokens there were then.
    losses: Losses,
    n_tokens_then: usize,
}

/// What is known of a replica's model.
#[derive(Clone, Debug, PartialEq)]
struct Model {
    vocabulary: String,
    bits: String,
}

impl Model {
    fn of(headers: &HeaderMap) -> Option<Self> {
        let (vocabulary, bits) = headers.get(MODEL)?.to_str().ok()?.split_once('-')?;
        let is_name = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let model = Self { vocabulary: vocabulary.to_owned(), bits: bits.to_owned() };
        (is_name(vocabulary) && is_name(bits)).then_some(model)
    }

    /// Whether the text will be the same: logits have the same bits in both places, whoever shares a step.
    fn promises_the_text_of(&self, other: &Self) -> bool {
        !self.bits.is_empty() && self == other
    }
}

impl Drop for Resumable {
    fn drop(&mut self) {
        if let Some(asked) = &self.kept {
            self.gateway.keep_no_more(asked.n_bytes());
        }
    }
}

/// Where an answer goes on.
pub struct GoneOn {
    /// The rest of it.
    pub answer: Answered,
    /// On that replica.
    pub flight: Flight,
    /// Its pod.
    pub pod: String,
    /// The text is what it would have been.
    pub is_exact: bool,
    slot: u32,
    model: Option<Model>,
    losses: Losses,
}

impl Resumable {
    /// Of an answer that begins; `None` if its replica does not tell what is needed.
    pub fn begin(
        gateway: &Arc<Gateway>,
        asked: &Arc<Asked>,
        host: &str,
        slot: u32,
        headers: &HeaderMap,
    ) -> Option<Self> {
        let model = Model::of(headers)?;
        let kept = (!asked.follows && gateway.keep(asked.n_bytes())).then(|| Arc::clone(asked));
        let (gateway, journal) = (Arc::clone(gateway), Journal::new(kept.is_some()));
        let (host, losses) = (host.to_owned(), Losses::default());
        Some(Self { gateway, kept, host, slot, model, journal, losses, n_tokens_then: 0 })
    }

    /// The gateway.
    pub fn gateway(&self) -> &Gateway {
        &self.gateway
    }

    /// How little its replica may live before it is left: who has nowhere to go waits longer.
    pub fn leaves_at(&self) -> Life {
        if self.kept.is_some() { Life::LeftBehind } else { Life::Stalled }
    }

    /// What finds a replica that goes on, after this one was lost; `None` if the request is not kept.
    pub fn go_on(&mut self, how: Loss) -> Option<impl Future<Output = Result<GoneOn, GatewayError>> + Send + 'static> {
        self.journal.drop_unsaid();
        if self.journal.n_tokens() > self.n_tokens_then {
            self.losses = Losses::default();
        }
        self.n_tokens_then = self.journal.n_tokens();
        self.losses.add(how);
        let search = Search {
            gateway: Arc::clone(&self.gateway),
            asked: Arc::clone(self.kept.as_ref()?),
            host: self.host.clone(),
            told: self.journal.told(&self.model.vocabulary).map(Bytes::from),
            model: self.model.clone(),
            losses: self.losses,
            patience: Patience::default(),
        };
        Some(search.run(self.slot))
    }

    /// It goes on there.
    pub fn moved(&mut self, there: &GoneOn) {
        (self.slot, self.losses) = (there.slot, there.losses);
        if let Some(model) = &there.model {
            self.model = model.clone();
        }
    }
}

/// Whether an answer is the rest of one: it has marks.
fn goes_on(answer: &Answered) -> bool {
    answer.status() == StatusCode::OK && answer.headers().contains_key(MODEL)
}

/// The search for a replica that goes on with an answer.
struct Search {
    gateway: Arc<Gateway>,
    asked: Arc<Asked>,
    host: String,
    told: Option<Bytes>,
    model: Model,
    losses: Losses,
    patience: Patience,
}

impl Search {
    async fn run(mut self, lost: u32) -> Result<GoneOn, GatewayError> {
        let mut rounds = Rounds::within(self.gateway.settings.resume);
        let (mut tried, mut why) = (vec![lost], "no other replica takes requests".to_owned());
        loop {
            if let Some(found) = self.round(&mut tried, &mut why).await {
                return Ok(found);
            }
            if self.losses.are_too_many() || !rounds.next().await {
                break;
            }
            tried.clear();
        }
        let message = format!("the replica that wrote this answer was lost, and it could not go on elsewhere: {why}");
        Err(GatewayError::new(StatusCode::BAD_GATEWAY, "replica_lost", message))
    }

    /// Asks all that are there.
    async fn round(&mut self, tried: &mut Vec<u32>, why: &mut String) -> Option<GoneOn> {
        let deployment = self.gateway.fleet().of_host(&self.host).cloned()?;
        while !self.losses.are_too_many() {
            let routed = self.gateway.choose(&deployment, &self.asked, tried)?;
            tried.push(routed.member.slot);
            match attempt(&self.gateway, &self.asked, self.told.as_ref(), self.patience, &routed).await {
                Attempt::Answered(answer, flight) if goes_on(&answer) => {
                    let model = Model::of(answer.headers());
                    let is_exact = model.as_ref().is_some_and(|model| model.promises_the_text_of(&self.model));
                    let (slot, pod) = (routed.member.slot, routed.member.pod.clone());
                    return Some(GoneOn { answer, flight, pod, is_exact, slot, model, losses: self.losses });
                }
                Attempt::Answered(answer, _) | Attempt::Refused(answer, _) => {
                    *why = format!("{} answered {}", routed.member.pod, answer.status().as_u16());
                }
                Attempt::Silent(Silence::Unreachable(error)) => *why = error,
                Attempt::Silent(Silence::Doubted) => {
                    self.patience.double();
                    *why = DEAD.to_owned();
                }
                Attempt::Silent(Silence::Lost(how, error)) => {
                    self.losses.add(how);
                    *why = error;
                }
            }
        }
        None
    }
}
