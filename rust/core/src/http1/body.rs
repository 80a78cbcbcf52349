//! The body of an engine's response: where its payload is, and where it ends.

use std::ops::Range;

use super::{MAX_EXTRA_BYTES, ProtocolError};

/// How a body is delimited (RFC 9112 section 6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// No body, whatever the header fields say: an answer to HEAD, 204 or 304.
    Empty,
    /// Exactly this many bytes.
    Length(u64),
    /// `Transfer-Encoding: chunked`.
    Chunked,
    /// Until the engine closes the connection.
    UntilClose,
}

/// One step through what was read: a piece of payload, possibly empty, and where to go on.
#[derive(Debug, PartialEq, Eq)]
pub struct Step {
    /// Where in the data this piece of payload is.
    pub payload: Range<usize>,
    /// The first byte after what this step used.
    pub next: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Chunk {
    /// In the size, after this many hexadecimal digits.
    Size(u8),
    Extension,
    SizeLf,
    Data,
    DataCr,
    DataLf,
    /// At the start of a line after the last chunk.
    Trailer,
    TrailerLine,
    TrailerLf,
    EndLf,
}

/// Follows the framing of one body over reads that are cut anywhere.
#[derive(Debug)]
pub struct Body {
    framing: Framing,
    /// Bytes still to come: of the body for a length, of the chunk (or its size so far) when chunked.
    remaining: u64,
    chunk: Chunk,
    extra_bytes: usize,
    complete: bool,
}

/// More digits than any size below 2^60 needs, leading zeros included, is an attack or a fault.
const MAX_SIZE_DIGITS: u8 = 15;

impl Body {
    /// A body of this framing, of which nothing was read yet.
    #[must_use]
    pub fn new(framing: Framing) -> Self {
        let (remaining, complete) = match framing {
            Framing::Empty => (0, true),
            Framing::Length(length) => (length, length == 0),
            Framing::Chunked | Framing::UntilClose => (0, false),
        };
        Self {
            framing,
            remaining,
            chunk: Chunk::Size(0),
            extra_bytes: 0,
            complete,
        }
    }

    /// How this body is delimited.
    #[must_use]
    pub fn framing(&self) -> Framing {
        self.framing
    }

    /// Whether the whole body has come. Bytes after it belong to no response: the connection cannot be used again.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// Whether the next byte would start a chunk.
    #[must_use]
    pub fn at_chunk_start(&self) -> bool {
        self.framing == Framing::Chunked && self.chunk == Chunk::Size(0) && !self.complete
    }

    /// Whether the chunks had neither extensions nor trailers: those are between the engine and the gateway only
    /// (RFC 9112 section 7.1.1, 7.1.2), so framing that has them cannot be passed on as it is.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.extra_bytes == 0
    }

    /// The engine closed the connection in an orderly way. Gives whether the body is complete.
    pub fn close(&mut self) -> bool {
        self.complete |= self.framing == Framing::UntilClose;
        self.complete
    }

    /// Goes on from `data[at]` to the end of the next piece of payload, of the body, or of the data.
    pub fn step(&mut self, data: &[u8], at: usize) -> Result<Step, ProtocolError> {
        match self.framing {
            _ if self.complete => Ok(Step {
                payload: at..at,
                next: at,
            }),
            Framing::Empty => Ok(Step {
                payload: at..at,
                next: at,
            }),
            Framing::UntilClose => Ok(Step {
                payload: at..data.len(),
                next: data.len(),
            }),
            Framing::Length(_) => {
                let end = self.take(data, at);
                self.complete = self.remaining == 0;
                Ok(Step {
                    payload: at..end,
                    next: end,
                })
            }
            Framing::Chunked => self.chunked(data, at),
        }
    }

    /// Counts what of `data[at..]` belongs to the bytes still to come; gives its end.
    fn take(&mut self, data: &[u8], at: usize) -> usize {
        let available = data.len() - at;
        let taken =
            usize::try_from(self.remaining).map_or(available, |remaining| remaining.min(available));
        self.remaining -= taken as u64;
        at + taken
    }

    fn chunked(&mut self, data: &[u8], mut at: usize) -> Result<Step, ProtocolError> {
        while at < data.len() {
            if self.chunk == Chunk::Data {
                let end = self.take(data, at);
                if self.remaining == 0 {
                    self.chunk = Chunk::DataCr;
                }
                // The line end is taken along, so that a read that ends with it ends on a chunk boundary.
                let mut next = end;
                while next < data.len() && matches!(self.chunk, Chunk::DataCr | Chunk::DataLf) {
                    self.chunk = self.transition(data[next])?;
                    next += 1;
                }
                return Ok(Step {
                    payload: at..end,
                    next,
                });
            }
            let byte = data[at];
            at += 1;
            if matches!(self.chunk, Chunk::EndLf) {
                if byte != b'\n' {
                    return Err(ProtocolError::Chunk);
                }
                self.complete = true;
                break;
            }
            self.chunk = self.transition(byte)?;
        }
        Ok(Step {
            payload: at..at,
            next: at,
        })
    }

    fn transition(&mut self, byte: u8) -> Result<Chunk, ProtocolError> {
        match (self.chunk, byte) {
            (Chunk::Size(digits), _) if byte.is_ascii_hexdigit() => {
                if digits == MAX_SIZE_DIGITS {
                    return Err(ProtocolError::Chunk);
                }
                let digit = char::from(byte).to_digit(16).unwrap_or_default();
                let before = if digits == 0 { 0 } else { self.remaining };
                self.remaining = before << 4 | u64::from(digit);
                Ok(Chunk::Size(digits + 1))
            }
            (Chunk::Size(1..) | Chunk::Extension, b'\r') => Ok(Chunk::SizeLf),
            (Chunk::SizeLf, b'\n') => Ok(if self.remaining == 0 {
                Chunk::Trailer
            } else {
                Chunk::Data
            }),
            (Chunk::Data | Chunk::DataCr, b'\r') => Ok(Chunk::DataLf),
            (Chunk::DataLf, b'\n') => Ok(Chunk::Size(0)),
            (Chunk::Trailer, b'\r') => Ok(Chunk::EndLf),
            (Chunk::TrailerLine, b'\r') => Ok(Chunk::TrailerLf),
            (Chunk::TrailerLf, b'\n') => Ok(Chunk::Trailer),
            (_, b'\n' | b'\0') => Err(ProtocolError::Chunk),
            (Chunk::Size(1..), b';' | b' ' | b'\t') | (Chunk::Extension, _) => {
                self.extra(Chunk::Extension)
            }
            (Chunk::Trailer | Chunk::TrailerLine, _) => self.extra(Chunk::TrailerLine),
            _ => Err(ProtocolError::Chunk),
        }
    }

    fn extra(&mut self, next: Chunk) -> Result<Chunk, ProtocolError> {
        self.extra_bytes += 1;
        if self.extra_bytes > MAX_EXTRA_BYTES {
            Err(ProtocolError::ExtraTooLarge)
        } else {
            Ok(next)
        }
    }
}
