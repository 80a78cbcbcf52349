//! The head the client gets in place of the engine's.

use std::io::Write as _;

use super::Head;

/// How the client's copy of the body is delimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientFraming {
    /// No body follows; a declared length, if any, describes what GET would have got.
    Empty(Option<u64>),
    /// Exactly this many bytes.
    Length(u64),
    /// Chunks of the gateway's own, or the engine's where they can go on as they are.
    Chunked,
    /// By closing the connection: for HTTP/1.0 clients.
    UntilClose,
}

/// What the gateway decides about a head beyond what the engine sent.
#[derive(Clone, Copy, Debug)]
pub struct ClientHead<'a> {
    /// How the body will be delimited.
    pub framing: ClientFraming,
    /// Whether the client's request was HTTP/1.1 or later.
    pub http_1_1: bool,
    /// Whether the client's connection stays open after the response.
    pub keep_alive: bool,
    /// Fields of the gateway, each in place of the engine's of the same name.
    pub set: &'a [(&'a [u8], &'a [u8])],
    /// Fields for when the engine sent none of that name.
    pub default: &'a [(&'a [u8], &'a [u8])],
}

/// Fields between the engine and the gateway only (RFC 9110 section 7.6.1, with the names older systems use).
const HOP_BY_HOP: [&str; 10] = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authentication-info",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Fields of which a response has one; a second one (an intermediary's) is left out.
const SINGLE: [&str; 2] = ["server", "date"];

/// The head for the client: the engine's status and fields, less those that are hop-by-hop or describe its framing.
///
/// Values keep their bytes, and repeated fields (`Set-Cookie`) stay separate and in order.
#[must_use]
pub fn write_head(head: &Head, client: &ClientHead<'_>) -> Vec<u8> {
    let mut out = Vec::with_capacity(512);
    // The version is the gateway's own, not the engine's (RFC 9110 section 6.2).
    let _ = write!(out, "HTTP/1.1 {:03} ", head.status());
    out.extend_from_slice(head.reason());
    out.extend_from_slice(b"\r\n");
    let named: Vec<&[u8]> = head.list("connection").collect();
    let mut single_seen = [false; SINGLE.len()];
    for (name, value) in head.fields() {
        let is = |other: &[u8]| name.eq_ignore_ascii_case(other);
        if is(b"content-length")
            || HOP_BY_HOP.iter().any(|other| is(other.as_bytes()))
            || named.iter().any(|other| is(other))
            || client.set.iter().any(|(other, _)| is(other))
        {
            continue;
        }
        if let Some(which) = SINGLE.iter().position(|other| is(other.as_bytes())) {
            if std::mem::replace(&mut single_seen[which], true) {
                continue;
            }
        }
        field(&mut out, name, value);
    }
    for (name, value) in client.set {
        field(&mut out, name, value);
    }
    for (name, value) in client.default {
        let same = |other: &[u8]| other.eq_ignore_ascii_case(name);
        let dropped = named.iter().any(|other| same(other));
        let sent = head.fields().any(|(other, _)| same(other)) && !dropped;
        if !sent && !client.set.iter().any(|(other, _)| same(other)) {
            field(&mut out, name, value);
        }
    }
    match client.framing {
        ClientFraming::Length(length) | ClientFraming::Empty(Some(length)) => {
            let _ = write!(out, "Content-Length: {length}\r\n");
        }
        ClientFraming::Chunked => out.extend_from_slice(b"Transfer-Encoding: chunked\r\n"),
        ClientFraming::Empty(None) | ClientFraming::UntilClose => {}
    }
    if !client.keep_alive {
        out.extend_from_slice(b"Connection: close\r\n");
    } else if !client.http_1_1 {
        out.extend_from_slice(b"Connection: keep-alive\r\n");
    }
    out.extend_from_slice(b"\r\n");
    out
}

fn field(out: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    out.extend_from_slice(name);
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}

/// Whether this can stand as one header field: a token, and a value that cannot end its line (RFC 9110 section 5.5).
#[must_use]
pub fn is_field(name: &[u8], value: &[u8]) -> bool {
    let token = |byte: &u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte);
    !name.is_empty()
        && name.iter().all(token)
        && !value
            .iter()
            .any(|byte| matches!(byte, b'\r' | b'\n' | b'\0'))
}
