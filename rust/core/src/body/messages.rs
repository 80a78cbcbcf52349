//! What the gateway asks of a body's conversation: how many prompts and messages, and a digest of each prefix of it.

use xxhash_rust::xxh3::xxh3_128;

use super::Body;
use super::text::end_of_string;
use crate::ids;

/// A digest of a message list up to and including one message.
pub type MessageDigest = [u8; 16];

/// Names the scheme: what a list of no messages digests to. A change of the scheme changes this text.
const SCHEME: &[u8] = b"kvroute.messages.v1";

impl<B: AsRef<[u8]>> Body<B> {
    /// Prompts of a completions request: one for a string or a flat list of token ids, else one for each element of
    /// the list. An absent `prompt` counts as one.
    pub fn prompt_count(&self) -> usize {
        let Some(prompt) = self.member("prompt") else {
            return 1;
        };
        let [b'[', inside @ ..] = self.text(prompt) else {
            return 1;
        };
        match inside.iter().find(|byte| !is_space(**byte)) {
            Some(b'-' | b'0'..=b'9') => 1,
            _ => prompt.elements,
        }
    }

    /// Token ids of each prompt of a completions request as little-endian `u32`s; `None` unless they came as ids.
    pub fn prompt_ids(&self) -> Option<Vec<Vec<u8>>> {
        ids::read_lists(self.raw("prompt")?)
    }

    /// Elements of `messages`, or of `input` where that is a list and there are no `messages`.
    pub fn message_count(&self) -> usize {
        self.message_list().map_or(0, |(_, elements)| elements)
    }

    /// A digest after each message, over that message and all before it.
    ///
    /// Two bodies share a digest when their messages up to there have the same text but for space outside of strings;
    /// key order, number text and escapes count, as they do for what a template renders. The digest of message i is
    /// XXH3-128 over the digest of message i-1 and the text of message i, written big-endian. It finds equal prefixes;
    /// it is no proof against a client that searches for collisions, so nothing may be shared between tenants by it.
    pub fn message_digests(&self) -> Vec<MessageDigest> {
        self.message_prefixes()
            .into_iter()
            .map(|(digest, _)| digest)
            .collect()
    }

    /// The digests of [`Body::message_digests`], each with the bytes of the list's text up to the end of its message.
    pub fn message_prefixes(&self) -> Vec<(MessageDigest, usize)> {
        let Some((list, elements)) = self.message_list() else {
            return Vec::new();
        };
        let mut prefixes = Vec::with_capacity(elements);
        let mut chain = Chain::new();
        let mut depth = 0_usize;
        // From behind the list's opening bracket on; `run` is where the text that is not yet in the chain starts.
        let (mut position, mut run) = (1, 1);
        while position < list.len() {
            let byte = list[position];
            let ends_message = depth == 0 && matches!(byte, b',' | b']');
            if ends_message || is_space(byte) {
                chain.push(&list[run..position]);
                run = position + 1;
            }
            if ends_message && prefixes.len() < elements {
                prefixes.push((chain.end_message(), position));
            }
            match byte {
                b'"' => position += end_of_string(&list[position..]) - 1,
                b'[' | b'{' => depth += 1,
                b']' | b'}' => depth = depth.saturating_sub(1),
                _ => {}
            }
            position += 1;
        }
        prefixes
    }

    /// The text and the number of elements of the list that holds the conversation.
    fn message_list(&self) -> Option<(&[u8], usize)> {
        let member = self.member("messages").or_else(|| self.member("input"))?;
        let raw = self.text(member);
        (raw[0] == b'[').then_some((raw, member.elements))
    }
}

/// The text of one message behind the digest of all before it.
struct Chain(Vec<u8>);

impl Chain {
    fn new() -> Self {
        Self(xxh3_128(SCHEME).to_be_bytes().to_vec())
    }

    fn push(&mut self, text: &[u8]) {
        self.0.extend_from_slice(text);
    }

    fn end_message(&mut self) -> MessageDigest {
        let digest = xxh3_128(&self.0).to_be_bytes();
        self.0.clear();
        self.0.extend(digest);
        digest
    }
}

const fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\n' | b'\r' | b'\t')
}

#[cfg(test)]
mod tests {
    use super::super::Body;

    fn body(text: &str) -> Body<&str> {
        Body::scan(text).unwrap()
    }

    #[test]
    fn prompts_are_counted_as_the_engine_splits_them() {
        for (prompt, count) in [
            ("null", 1),
            ("\"one\"", 1),
            ("[ 1, 2,3]", 1),
            ("[]", 0),
            ("[ ]", 0),
            ("[\"a\"]", 1),
            ("[ \"a\", \"b,c\" ]", 2),
            ("[[1,2],[3,4],[5]]", 3),
        ] {
            assert_eq!(
                body(&format!(r#"{{"prompt": {prompt}, "n": 1}}"#)).prompt_count(),
                count,
                "{prompt}"
            );
        }
        assert_eq!(body("{}").prompt_count(), 1);
    }

    #[test]
    fn messages_come_before_input_and_only_lists_count() {
        for (text, count) in [
            ("{}", 0),
            (r#"{"messages":"text"}"#, 0),
            (r#"{"messages":{"a":1,"b":2}}"#, 0),
            (r#"{"messages":[]}"#, 0),
            (
                r#"{"messages":[{"role":"user","content":"a,b"},{"content":[1,2,3]}]}"#,
                2,
            ),
            (r#"{"input":[{},{},{}]}"#, 3),
            (r#"{"input":[{},{},{}],"messages":[{}]}"#, 1),
            (r#"{"input":"text"}"#, 0),
        ] {
            assert_eq!(body(text).message_count(), count, "{text}");
            assert_eq!(body(text).message_digests().len(), count, "{text}");
        }
    }

    #[test]
    fn space_outside_of_strings_does_not_count_and_all_else_does() {
        let digests = |list: &str| body(&format!(r#"{{"messages":{list}}}"#)).message_digests();
        let plain =
            digests(r#"[{"role":"user","content":"a b"},{"role":"assistant","content":["]",1]}]"#);
        let spaced = digests(
            "[ {\n\t\"role\" : \"user\", \"content\":\"a b\"} ,\r\n{\"role\":\"assistant\",\"content\":[ \"]\", 1 ] } ]",
        );
        assert_eq!(plain, spaced);
        let other_end =
            digests(r#"[{"role":"user","content":"a b"},{"role":"assistant","content":["]",2]}]"#);
        assert_eq!(plain[0], other_end[0]);
        assert_ne!(plain[1], other_end[1]);
        let other_start =
            digests(r#"[{"role":"user","content":"a  b"},{"role":"assistant","content":["]",1]}]"#);
        assert_ne!(plain[0], other_start[0]);
        assert_ne!(plain[1], other_start[1]);
    }

    #[test]
    fn ends_are_those_of_the_text_as_it_was_sent() {
        let list = r#"[ {"role":"user","content":"a, b"} , {"content":[1,2]}]"#;
        let text = format!(r#"{{"messages":{list}}}"#);
        let ends: Vec<usize> = body(&text)
            .message_prefixes()
            .into_iter()
            .map(|(_, end)| end)
            .collect();
        let cuts: Vec<&str> = ends.iter().map(|end| list[..*end].trim_end()).collect();
        assert_eq!(
            cuts,
            [
                r#"[ {"role":"user","content":"a, b"}"#,
                &list[..list.len() - 1]
            ]
        );
    }

    #[test]
    fn digests_are_the_same_in_every_process_and_version() {
        let digests = body(
            r#"{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"ho"}]}"#,
        );
        let numbers: Vec<u128> = digests
            .message_digests()
            .into_iter()
            .map(u128::from_be_bytes)
            .collect();
        assert_eq!(
            numbers,
            [
                0x3e75_3c1a_8df9_3f26_70fd_579c_c282_26d2,
                0xb0dc_db1e_da42_b68d_3714_0450_5dd5_9251
            ]
        );
    }
}
