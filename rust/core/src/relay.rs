//! One response on its way from an engine to a client: framing and scanner joined, one call per network read.

use std::ops::Range;

use crate::http1::{Body, ClientFraming, Framing, ProtocolError};
use crate::sse::{Document, EventTooLarge, Facts, Pass, Scanner};

/// What is read of a body while it passes.
#[derive(Debug)]
pub enum Watch {
    /// Nothing.
    Nothing,
    /// An event stream.
    Events(Scanner),
    /// One JSON document, which passes as it comes.
    Document(Document),
}

/// What goes on to the client of one read.
#[derive(Debug, PartialEq, Eq)]
pub enum Forward {
    /// The read itself, framing and all.
    Same,
    /// These bytes, possibly none.
    Bytes(Vec<u8>),
}

/// Why a body cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RelayError {
    /// The engine does not speak HTTP as it should.
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
    /// An event that must be held back until its end is too long.
    #[error(transparent)]
    EventTooLarge(#[from] EventTooLarge),
}

/// Where a body stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// More of it is to come.
    Open,
    /// All of it went on.
    Complete,
    /// The engine closed the connection before its end.
    Cut,
    /// It cannot go on.
    Failed(RelayError),
}

/// Relays one body. The output after every read ends on a chunk boundary, if it is chunked at all, so reads that go on
/// as they came and reads framed anew mix freely, and an event of the gateway's own can follow at any time.
#[derive(Debug)]
pub struct Relay {
    body: Body,
    watch: Watch,
    client: ClientFraming,
    state: State,
    payload_bytes: u64,
    excess: bool,
    /// Whether what the client has ends on a chunk boundary of the engine's, so that its framing can go on.
    in_step: bool,
}

/// The chunk that ends a chunked body.
const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

impl Relay {
    /// A relay before the first byte of the body.
    #[must_use]
    pub fn new(body: Body, watch: Watch, client: ClientFraming) -> Self {
        Self {
            body,
            watch,
            client,
            state: State::Open,
            payload_bytes: 0,
            excess: false,
            in_step: true,
        }
    }

    /// Where the body stands.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// Bytes of payload, without framing, that went on to the client.
    #[must_use]
    pub fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// Whether the engine sent bytes after the end of the body.
    #[must_use]
    pub fn has_excess(&self) -> bool {
        self.excess
    }

    /// What the body has told so far, if it is watched.
    #[must_use]
    pub fn facts(&self) -> Option<&Facts> {
        match &self.watch {
            Watch::Nothing => None,
            Watch::Events(scanner) => Some(scanner.facts()),
            Watch::Document(document) => Some(document.facts()),
        }
    }

    /// Whether an event of the gateway's own may follow what the client has: not behind a declared length.
    #[must_use]
    pub fn at_event_boundary(&self) -> bool {
        let open_ended = matches!(
            self.client,
            ClientFraming::Chunked | ClientFraming::UntilClose
        );
        open_ended && matches!(&self.watch, Watch::Events(scanner) if scanner.at_boundary())
    }

    /// Takes one network read. After it, [`state`](Self::state) says whether there is more to come.
    pub fn feed(&mut self, data: &[u8]) -> Forward {
        if self.state != State::Open {
            self.excess |= !data.is_empty();
            return Forward::Bytes(Vec::new());
        }
        let mut payload = Payload {
            data,
            same: Vec::new(),
            edited: None,
        };
        let mut at = 0;
        while at < data.len() && !self.body.is_complete() {
            match self.body.step(data, at) {
                Ok(step) => {
                    at = step.next;
                    if let Err(error) = self.pass(step.payload, &mut payload) {
                        self.state = State::Failed(error.into());
                        break;
                    }
                }
                Err(error) => {
                    self.state = State::Failed(error.into());
                    break;
                }
            }
        }
        if self.state == State::Open && self.body.is_complete() {
            self.excess = at < data.len();
            self.complete(&mut payload);
        }
        self.emit(&payload)
    }

    /// The engine closed the connection in an orderly way. Gives what is still to go on.
    pub fn close(&mut self) -> Vec<u8> {
        if self.state != State::Open {
            return Vec::new();
        }
        let mut payload = Payload {
            data: &[],
            same: Vec::new(),
            edited: None,
        };
        if self.body.close() {
            self.complete(&mut payload);
            match self.emit(&payload) {
                Forward::Bytes(bytes) => bytes,
                Forward::Same => Vec::new(),
            }
        } else {
            self.state = State::Cut;
            Vec::new()
        }
    }

    fn pass(&mut self, part: Range<usize>, payload: &mut Payload<'_>) -> Result<(), EventTooLarge> {
        let piece = &payload.data[part.clone()];
        match &mut self.watch {
            Watch::Events(scanner) if !piece.is_empty() => {
                let mut out = Vec::new();
                match scanner.feed(piece, &mut out) {
                    Ok(Pass::Same) => payload.show(part),
                    Ok(Pass::Edited) => payload.append(&out),
                    Err(error) => {
                        payload.append(&out);
                        return Err(error);
                    }
                }
            }
            Watch::Document(document) if !self.body.is_complete() => {
                document.feed(piece);
                payload.show(part);
            }
            // The last piece of a document is read in place, in `complete`.
            _ => payload.show(part),
        }
        Ok(())
    }

    fn complete(&mut self, payload: &mut Payload<'_>) {
        match &mut self.watch {
            Watch::Nothing => {}
            Watch::Events(scanner) => {
                let mut rest = Vec::new();
                scanner.finish(&mut rest);
                if !rest.is_empty() {
                    payload.append(&rest);
                }
            }
            Watch::Document(document) => {
                let last = match self.body.framing() {
                    Framing::Length(_) => payload.same.last().cloned().unwrap_or_default(),
                    _ => 0..0,
                };
                document.finish(&payload.data[last]);
            }
        }
        self.state = State::Complete;
    }

    fn emit(&mut self, payload: &Payload<'_>) -> Forward {
        let length = payload.len();
        self.payload_bytes += length as u64;
        let ends = self.state == State::Complete;
        let chunked = self.client == ClientFraming::Chunked;
        if chunked && self.body.framing() == Framing::Chunked {
            let ends_in_step = ends || self.body.at_chunk_start();
            let starts_in_step = std::mem::replace(&mut self.in_step, ends_in_step);
            let as_it_came = starts_in_step && ends_in_step && payload.edited.is_none();
            if as_it_came
                && !self.excess
                && self.body.is_plain()
                && !matches!(self.state, State::Failed(_))
            {
                return Forward::Same;
            }
        } else if !chunked && payload.is_all() {
            return Forward::Same;
        }
        let mut out = Vec::with_capacity(length + 32);
        if chunked && length > 0 {
            out.extend_from_slice(format!("{length:x}\r\n").as_bytes());
            payload.write(&mut out);
            out.extend_from_slice(b"\r\n");
        } else {
            payload.write(&mut out);
        }
        if chunked && ends {
            out.extend_from_slice(LAST_CHUNK);
        }
        Forward::Bytes(out)
    }
}

/// The payload of one read that goes on.
struct Payload<'a> {
    data: &'a [u8],
    /// Parts that go on as they came, if nothing is edited.
    same: Vec<Range<usize>>,
    edited: Option<Vec<u8>>,
}

impl Payload<'_> {
    fn show(&mut self, part: Range<usize>) {
        match &mut self.edited {
            Some(edited) => edited.extend_from_slice(&self.data[part]),
            None if part.is_empty() => {}
            None => self.same.push(part),
        }
    }

    fn append(&mut self, bytes: &[u8]) {
        let edited = self.edited.get_or_insert_with(|| {
            let mut before = Vec::with_capacity(self.data.len());
            self.same
                .iter()
                .for_each(|part| before.extend_from_slice(&self.data[part.clone()]));
            before
        });
        edited.extend_from_slice(bytes);
    }

    fn len(&self) -> usize {
        self.edited
            .as_ref()
            .map_or_else(|| self.same.iter().map(Range::len).sum(), Vec::len)
    }

    fn is_all(&self) -> bool {
        self.edited.is_none() && self.len() == self.data.len()
    }

    fn write(&self, out: &mut Vec<u8>) {
        match &self.edited {
            Some(edited) => out.extend_from_slice(edited),
            None => self
                .same
                .iter()
                .for_each(|part| out.extend_from_slice(&self.data[part.clone()])),
        }
    }
}
