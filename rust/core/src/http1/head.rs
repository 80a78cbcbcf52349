//! The head of an engine's response.

use std::ops::Range;

use memchr::memchr_iter;

use super::{Framing, MAX_HEAD_BYTES, MAX_HEADERS, ProtocolError};

/// A parsed response head: the bytes as they came, and where its parts are.
#[derive(Clone, Debug)]
pub struct Head {
    bytes: Vec<u8>,
    status: u16,
    http_1_1: bool,
    reason: Range<usize>,
    fields: Vec<(Range<usize>, Range<usize>)>,
}

impl Head {
    /// The status code, never 1xx.
    #[must_use]
    pub fn status(&self) -> u16 {
        self.status
    }

    /// The reason phrase as it came, possibly empty.
    #[must_use]
    pub fn reason(&self) -> &[u8] {
        &self.bytes[self.reason.clone()]
    }

    /// Name and value of each header field, in order and as they came.
    pub fn fields(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.fields
            .iter()
            .map(|(name, value)| (&self.bytes[name.clone()], &self.bytes[value.clone()]))
    }

    /// The values of every field called `name`, in order.
    pub fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
        self.fields()
            .filter(move |(field, _)| field.eq_ignore_ascii_case(name.as_bytes()))
            .map(|(_, value)| value)
    }

    /// The elements of a comma-separated field, over all its lines, without the whitespace around them.
    pub fn list<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
        self.values(name)
            .flat_map(|value| value.split(|&byte| byte == b','))
            .map(<[u8]>::trim_ascii)
            .filter(|element| !element.is_empty())
    }

    /// Whether the engine means to keep the connection open after this response (RFC 9112 section 9.3).
    ///
    /// A response with both lengths, or a chunked one from HTTP/1.0, may have been put together by a faulty
    /// intermediary: it is read to its end, and the connection is not used again (section 6.1 and 6.3).
    #[must_use]
    pub fn keep_alive(&self) -> bool {
        let named = |option: &str| {
            self.list("connection")
                .any(|element| element.eq_ignore_ascii_case(option.as_bytes()))
        };
        let coded = self.values("transfer-encoding").next().is_some();
        if coded && (!self.http_1_1 || self.values("content-length").next().is_some()) {
            return false;
        }
        if self.http_1_1 {
            !named("close")
        } else {
            named("keep-alive") && !named("close")
        }
    }

    /// Whether the body is `media_type` (lower case), and not coded so that its text cannot be read.
    #[must_use]
    pub fn is_plain(&self, media_type: &str) -> bool {
        let sent = self.values("content-type").last().unwrap_or_default();
        let sent = sent
            .split(|&byte| byte == b';')
            .next()
            .unwrap_or_default()
            .trim_ascii();
        sent.eq_ignore_ascii_case(media_type.as_bytes()) && !self.is_encoded()
    }

    /// Whether the body is compressed, or otherwise coded.
    #[must_use]
    pub fn is_encoded(&self) -> bool {
        self.list("content-encoding")
            .any(|coding| !coding.eq_ignore_ascii_case(b"identity"))
    }

    /// How the body after this head is delimited, in the order of RFC 9112 section 6.3.
    pub fn framing(&self, request_is_head: bool) -> Result<Framing, ProtocolError> {
        if request_is_head || matches!(self.status, 204 | 304) {
            return Ok(Framing::Empty);
        }
        let mut codings = self.list("transfer-encoding").peekable();
        if codings.peek().is_some() {
            let exactly_chunked = codings
                .next()
                .is_some_and(|coding| coding.eq_ignore_ascii_case(b"chunked"))
                && codings.next().is_none();
            return if exactly_chunked {
                Ok(Framing::Chunked)
            } else {
                Err(ProtocolError::TransferEncoding)
            };
        }
        Ok(self
            .content_length()?
            .map_or(Framing::UntilClose, Framing::Length))
    }

    /// The declared length, if there is one. Repeated equal values count as one (RFC 9110 section 8.6).
    pub fn content_length(&self) -> Result<Option<u64>, ProtocolError> {
        let mut length = None;
        for value in self
            .values("content-length")
            .flat_map(|value| value.split(|&byte| byte == b','))
        {
            let digits = value.trim_ascii();
            let parsed = std::str::from_utf8(digits)
                .ok()
                .filter(|_| digits.iter().all(u8::is_ascii_digit))
                .and_then(|text| text.parse::<u64>().ok())
                .ok_or(ProtocolError::ContentLength)?;
            if length.is_some_and(|earlier| earlier != parsed) {
                return Err(ProtocolError::ContentLength);
            }
            length = Some(parsed);
        }
        Ok(length)
    }
}

/// Collects bytes until the head of the final response is complete.
#[derive(Debug, Default)]
pub struct HeadParser {
    buffer: Vec<u8>,
    interim_bytes: usize,
}

impl HeadParser {
    /// Takes what was read; gives the head once it is complete, with how much of `data` belongs to the heads.
    ///
    /// Interim responses (1xx) are skipped: the gateway never announces `Expect`, so they tell it nothing.
    pub fn feed(&mut self, data: &[u8]) -> Result<Option<(Head, usize)>, ProtocolError> {
        // Only a blank line can complete a head, so the parser is not run again for every byte of a slow one.
        let seen = self.buffer.len();
        let mut start = 0;
        self.buffer.extend_from_slice(data);
        let searched = seen.saturating_sub(2);
        let ends: Vec<usize> = memchr_iter(b'\n', &self.buffer[searched..])
            .map(|at| searched + at + 1)
            .filter(|&after| after > seen)
            .filter(|&after| {
                let before = &self.buffer[..after - 1];
                before.ends_with(b"\n") || before.ends_with(b"\n\r")
            })
            .collect();
        for end in ends {
            if end <= start {
                continue;
            }
            if self.interim_bytes + end > MAX_HEAD_BYTES {
                return Err(ProtocolError::HeadTooLarge);
            }
            let Some((head, length)) = parse(&self.buffer[start..end])? else {
                continue;
            };
            start += length;
            if head.status == 101 {
                return Err(ProtocolError::Upgrade);
            }
            if head.status >= 200 {
                return Ok(Some((head, start - seen)));
            }
        }
        self.interim_bytes += start;
        self.buffer.drain(..start);
        if self.interim_bytes + self.buffer.len() > MAX_HEAD_BYTES {
            return Err(ProtocolError::HeadTooLarge);
        }
        Ok(None)
    }

    /// Whether any byte of a response has come.
    #[must_use]
    pub fn started(&self) -> bool {
        self.interim_bytes + self.buffer.len() > 0
    }
}

fn parse(bytes: &[u8]) -> Result<Option<(Head, usize)>, ProtocolError> {
    let mut storage = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut response = httparse::Response::new(&mut storage);
    let httparse::Status::Complete(length) = response.parse(bytes).map_err(ProtocolError::Head)?
    else {
        return Ok(None);
    };
    // httparse lends parts of `bytes`, so their distance from its start is their place in the copy.
    let place = |part: &[u8]| {
        let start = (part.as_ptr() as usize).saturating_sub(bytes.as_ptr() as usize);
        if part.is_empty() || start + part.len() > length {
            0..0
        } else {
            start..start + part.len()
        }
    };
    let head = Head {
        status: response.code.unwrap_or_default(),
        http_1_1: response.version == Some(1),
        reason: place(response.reason.unwrap_or_default().as_bytes()),
        fields: response
            .headers
            .iter()
            .map(|field| (place(field.name.as_bytes()), place(field.value)))
            .collect(),
        bytes: bytes[..length].to_vec(),
    };
    Ok(Some((head, length)))
}
