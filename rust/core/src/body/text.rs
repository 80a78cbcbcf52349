//! Inside JSON strings: where they end, what they mean, and how a name is written as one.

use memchr::memchr2;

/// Offset of the first byte in `text` that needs a look inside a string: a quote, a backslash or a control character.
///
/// Eight bytes are looked at in one step. Bodies are mostly strings, and strings of chat bodies hold an escaped line
/// break or quote every few words, so that the set-up of wider vector searches costs more than it gains.
pub(super) fn next_special(text: &[u8]) -> Option<usize> {
    const LOW: u64 = u64::from_ne_bytes([0x01; 8]);
    const HIGH: u64 = u64::from_ne_bytes([0x80; 8]);
    // High bit set in each zero byte. A borrow can set it wrongly only above a byte where it is set rightly, so the lowest one holds.
    let zeros = |word: u64| word.wrapping_sub(LOW) & !word;
    let mut chunks = text.chunks_exact(8);
    let mut offset = 0;
    for chunk in &mut chunks {
        let word = u64::from_le_bytes(chunk.try_into().expect("chunks_exact gives eight bytes"));
        let control = word.wrapping_sub(LOW * 0x20) & !word;
        let quote = zeros(word ^ (LOW * u64::from(b'"')));
        let backslash = zeros(word ^ (LOW * u64::from(b'\\')));
        let found = (control | quote | backslash) & HIGH;
        if found != 0 {
            return Some(offset + found.trailing_zeros() as usize / 8);
        }
        offset += 8;
    }
    let special = |byte: &u8| *byte < 0x20 || *byte == b'"' || *byte == b'\\';
    chunks
        .remainder()
        .iter()
        .position(special)
        .map(|index| offset + index)
}

/// Offset just behind the closing quote of a valid string that starts at `text[0]`, a quote.
pub(super) fn end_of_string(text: &[u8]) -> usize {
    let mut position = 1;
    while let Some(step) = memchr2(b'"', b'\\', &text[position..]) {
        if text[position + step] == b'"' {
            return position + step + 1;
        }
        position += step + 2;
    }
    text.len()
}

/// What the inside of a valid JSON string means, as UTF-8.
///
/// A surrogate escape without its partner has no UTF-8; it becomes the three bytes that its number would have (WTF-8),
/// so the result is a `str` exactly when the string is Unicode text, and never equals another string's.
pub(super) fn unescape(inside: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(inside.len());
    let mut rest = inside;
    while let Some(at) = memchr::memchr(b'\\', rest) {
        out.extend_from_slice(&rest[..at]);
        let escape = rest[at + 1];
        rest = &rest[at + 2..];
        out.push(match escape {
            b'b' => 0x08,
            b'f' => 0x0c,
            b'n' => b'\n',
            b'r' => b'\r',
            b't' => b'\t',
            b'u' => {
                let mut code = hex(&rest[..4]);
                rest = &rest[4..];
                if (0xd800..0xdc00).contains(&code) && rest.starts_with(b"\\u") {
                    let low = hex(&rest[2..6]);
                    if (0xdc00..0xe000).contains(&low) {
                        code = 0x1_0000 + ((code - 0xd800) << 10) + (low - 0xdc00);
                        rest = &rest[6..];
                    }
                }
                push_code_point(&mut out, code);
                continue;
            }
            same => same,
        });
    }
    out.extend_from_slice(rest);
    out
}

fn hex(digits: &[u8]) -> u32 {
    digits.iter().fold(0, |number, digit| {
        number << 4 | char::from(*digit).to_digit(16).unwrap_or(0)
    })
}

fn push_code_point(out: &mut Vec<u8>, code: u32) {
    if let Some(char) = char::from_u32(code) {
        out.extend_from_slice(char.encode_utf8(&mut [0; 4]).as_bytes());
    } else {
        let [.., high, low] = code.to_be_bytes();
        out.extend([
            0xe0 | high >> 4,
            0x80 | (high & 0x0f) << 2 | low >> 6,
            0x80 | low & 0x3f,
        ]);
    }
}

/// Writes `name` as a JSON string.
pub(super) fn quote(name: &str, out: &mut Vec<u8>) {
    out.push(b'"');
    for byte in name.bytes() {
        match byte {
            b'"' | b'\\' => out.extend([b'\\', byte]),
            0..0x20 => out.extend_from_slice(format!("\\u{byte:04x}").as_bytes()),
            _ => out.push(byte),
        }
    }
    out.push(b'"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_special_byte_is_found_at_every_offset_and_no_other() {
        for byte in 0..=u8::MAX {
            let special = byte < 0x20 || byte == b'"' || byte == b'\\';
            for offset in 0..20 {
                for filler in [b'a', 0x20, 0x7f, 0x80, 0xff] {
                    let mut text = [filler; 20];
                    text[offset] = byte;
                    assert_eq!(
                        next_special(&text),
                        special.then_some(offset),
                        "{byte:#x} at {offset} in {filler:#x}"
                    );
                }
            }
        }
    }

    #[test]
    fn escapes_mean_what_rfc_8259_says() {
        let cases: [(&str, &[u8]); 8] = [
            ("plain", b"plain"),
            ("mod\\u0065l", b"model"),
            (r#"\"\\\/\b\f\n\r\t"#, b"\"\\/\x08\x0c\n\r\t"),
            ("\\u00E9\\u5317", "é北".as_bytes()),
            ("\\ud83d\\ude42!", "🙂!".as_bytes()),
            ("\\ud83d", b"\xed\xa0\xbd"),
            ("\\ud83d\\u0041", b"\xed\xa0\xbdA"),
            ("\\ude42\\ud83d", b"\xed\xb9\x82\xed\xa0\xbd"),
        ];
        for (inside, meaning) in cases {
            assert_eq!(unescape(inside.as_bytes()), meaning, "{inside}");
        }
    }

    #[test]
    fn a_string_ends_at_its_first_quote_that_is_not_escaped() {
        for (text, end) in [
            (r#""""#, 2),
            (r#""a\"b" x"#, 6),
            (r#""\\" ""#, 4),
            (r#""\\\"" ""#, 6),
        ] {
            assert_eq!(end_of_string(text.as_bytes()), end, "{text}");
        }
    }

    #[test]
    fn a_quoted_name_reads_back() {
        let name = "a\"b\\c\n\u{1}é/🙂";
        let mut quoted = Vec::new();
        quote(name, &mut quoted);
        assert_eq!(serde_json::from_slice::<String>(&quoted).unwrap(), name);
        assert_eq!(unescape(&quoted[1..quoted.len() - 1]), name.as_bytes());
    }
}
