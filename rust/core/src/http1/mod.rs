//! Response framing of HTTP/1.1 (RFC 9112): the head an engine sends, the body that follows it, and the head a client
//! gets instead.
//!
//! Everything here is incremental and bounded: a head of at most [`MAX_HEAD_BYTES`] with at most [`MAX_HEADERS`]
//! fields, chunk extensions and trailers of at most [`MAX_EXTRA_BYTES`].

mod body;
mod client;
mod head;

pub use body::{Body, Framing, Step};
pub use client::{ClientFraming, ClientHead, is_field, write_head};
pub use head::{Head, HeadParser};

/// Most bytes of all response heads of one request together, interim (1xx) ones included.
pub const MAX_HEAD_BYTES: usize = 64 * 1024;

/// Most header fields of one response head.
pub const MAX_HEADERS: usize = 128;

/// Most bytes of the chunk extensions and trailers of one body.
pub const MAX_EXTRA_BYTES: usize = 16 * 1024;

/// What an engine sent that is not HTTP/1.1 as RFC 9112 has it, or more than the limits allow.
///
/// After any of these nothing further on the connection can be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// The status line or a header field cannot be parsed.
    #[error("the response head is malformed: {0}")]
    Head(httparse::Error),
    /// More than [`MAX_HEAD_BYTES`] without the end of a head.
    #[error("the response head is longer than {MAX_HEAD_BYTES} bytes")]
    HeadTooLarge,
    /// `101 Switching Protocols`, which the gateway never asks for.
    #[error("the engine switched protocols without being asked to")]
    Upgrade,
    /// Several lengths that differ, or one that is not a decimal number.
    #[error("the Content-Length is malformed or contradicts itself")]
    ContentLength,
    /// A coding other than `chunked`, or `chunked` more than once: the end of the body cannot be found.
    #[error("the Transfer-Encoding is not exactly chunked")]
    TransferEncoding,
    /// A chunk size line, or the line end after a chunk, is not what RFC 9112 section 7.1 has.
    #[error("the chunked body is malformed")]
    Chunk,
    /// Chunk extensions or trailers above [`MAX_EXTRA_BYTES`].
    #[error("the chunk extensions and trailers are longer than {MAX_EXTRA_BYTES} bytes")]
    ExtraTooLarge,
}
