//! An answer that is not streamed, while its replica tells its tokens: waited for until all of it is there, with whoever goes on when
//! that replica is lost. Its bytes are the agent's, and its client sees nothing of this.

use std::time::Instant;

use axum::http::StatusCode;
use bytes::Bytes;
use http_body_util::{BodyExt, Either, Full};
use tokio::time::timeout;

use crate::{
    access::Access,
    attempt::{Answered, ENDED_EARLIER, ENGINE_DIED},
    error::GatewayError,
    journal::{Passed, Then},
    relay::SILENCE,
    resume::Resumable,
    search::Loss,
    usage::{DEVICE_SECONDS, Usage, device_seconds},
    vital::{DEAD, Flight},
};

/// One that is being made.
pub struct Telling {
    /// Its head, and what has not come yet.
    pub response: Answered,
    /// On its replica.
    pub flight: Flight,
    /// What was told.
    pub resumable: Resumable,
}

/// How a replica's part of it ended.
enum Part {
    /// That was all: a body and its status.
    All(Bytes, StatusCode),
    Lost(Loss, String),
}

impl Telling {
    /// All of it.
    pub async fn whole(mut self, access: &mut Access) -> Result<(Answered, Flight), GatewayError> {
        loop {
            let mut heard = Instant::now();
            let (how, why) = match self.part(access, &mut heard).await {
                Part::All(body, status) => return Ok(self.answered(body, status)),
                Part::Lost(how, why) => (how, why),
            };
            access.lost(&why, heard);
            let Some(search) = self.resumable.go_on(how) else {
                let message = format!("the replica that made this answer was lost: {why}");
                return Err(GatewayError::new(StatusCode::BAD_GATEWAY, "replica_lost", message));
            };
            // The connection goes with it: whoever is alive nevertheless stops computing.
            self.response = Answered::new(Either::Right(Full::default()));
            let there = search.await?;
            self.resumable.moved(&there);
            access.goes_on(&there.pod, there.is_exact);
            (self.response, self.flight) = (there.answer, there.flight);
        }
    }

    /// Reads what this replica tells, until all is there or the replica is lost.
    async fn part(&mut self, access: &mut Access, heard: &mut Instant) -> Part {
        let lost = |how, why: &str| Part::Lost(how, why.to_owned());
        loop {
            let vital = self.flight.vital();
            let frame = tokio::select! {
                frame = timeout(SILENCE, self.response.body_mut().frame()) => frame,
                () = vital.falls_to(self.resumable.leaves_at()) => return lost(Loss::Left, DEAD),
            };
            let data = match frame {
                Ok(Some(Ok(frame))) => frame.into_data().unwrap_or_default(),
                Ok(Some(Err(error))) => return lost(Loss::Broken, &error.to_string()),
                Ok(None) => return lost(Loss::Broken, "it ended the answer before its end"),
                Err(_) => return Part::Lost(Loss::Left, format!("it was silent for {} s", SILENCE.as_secs())),
            };
            vital.heard(self.resumable.gateway().now_ms());
            self.flight.prefilled();
            *heard = Instant::now();
            access.came();
            let Passed { data, then } = self.resumable.journal.pass(data);
            // Of a client that leaves, too.
            access.usage = self.resumable.journal.usage();
            match then {
                Then::More => {}
                Then::Done => return Part::All(without_line_feed(data), StatusCode::OK),
                Then::Failed(status) => {
                    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
                    return Part::All(without_line_feed(data), status);
                }
                Then::Elsewhere => return lost(Loss::Left, ENDED_EARLIER),
                Then::Broken => return lost(Loss::Broken, ENGINE_DIED),
                Then::Unreadable => return lost(Loss::Broken, "what it says cannot be read"),
            }
        }
    }

    /// With the head of the replica that told the end.
    fn answered(self, body: Bytes, status: StatusCode) -> (Answered, Flight) {
        let (mut parts, _) = self.response.into_parts();
        parts.status = status;
        let told = self.resumable.journal.usage();
        parts.extensions.insert(Usage { device_time: told.device_time, ..Usage::of_whole(&body).unwrap_or(told) });
        parts.headers.extend(told.device_time.map(|time| (DEVICE_SECONDS, device_seconds(time))));
        (Answered::from_parts(parts, Either::Right(Full::new(body))), self.flight)
    }
}

/// A mark begins a line, so there is one before the last mark that is not the answer's.
fn without_line_feed(said: Bytes) -> Bytes {
    said.slice(..said.len() - usize::from(said.ends_with(b"\n")))
}
