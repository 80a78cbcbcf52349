//! Token ids as JSON lists of them, which hold a hundred thousand: each list is read in one loop.

/// Bytes of ids above which they are given up: 4 Mi tokens. A body or a stream must not fill the gateway's memory.
pub const MOST: usize = 16 << 20;

/// Reads a JSON list of ids, which is all of the text, to little-endian `u32`s; `None` if anything in it is no `u32`
/// without sign, point or exponent, or there are more than [`MOST`] bytes of them.
#[must_use]
pub fn read_list(list: &[u8]) -> Option<Vec<u8>> {
    let inner = list.strip_prefix(b"[")?.strip_suffix(b"]")?;
    let mut ids = Vec::with_capacity((inner.len() / 4 * 4).min(MOST));
    let mut at = skip_space(inner, 0);
    while at < inner.len() {
        let start = at;
        let mut id = 0_u32;
        while let Some(digit @ b'0'..=b'9') = inner.get(at) {
            id = id.checked_mul(10)?.checked_add(u32::from(digit - b'0'))?;
            at += 1;
        }
        let is_number = at == start + 1 || at > start && inner[start] != b'0';
        if !is_number || ids.len() == MOST {
            return None;
        }
        ids.extend_from_slice(&id.to_le_bytes());
        at = skip_space(inner, at);
        if at < inner.len() {
            let comma = (inner[at] == b',').then_some(at)?;
            at = skip_space(inner, comma + 1);
            (at < inner.len()).then_some(())?;
        }
    }
    Some(ids)
}

/// Reads a JSON list of ids, or a list of such lists, which is all of the text: one entry for each list of ids.
#[must_use]
pub fn read_lists(text: &[u8]) -> Option<Vec<Vec<u8>>> {
    text.strip_prefix(b"[")?;
    let mut at = skip_space(text, 1);
    if text.get(at) != Some(&b'[') {
        return Some(vec![read_list(text)?]);
    }
    let mut lists = Vec::new();
    loop {
        let end = at + memchr::memchr(b']', &text[at..])? + 1;
        lists.push(read_list(&text[at..end])?);
        at = skip_space(text, end);
        match text.get(at)? {
            b',' => at = skip_space(text, at + 1),
            b']' if at + 1 == text.len() => return Some(lists),
            _ => return None,
        }
    }
}

fn skip_space(text: &[u8], mut at: usize) -> usize {
    while matches!(text.get(at), Some(b' ' | b'\t' | b'\n' | b'\r')) {
        at += 1;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(ids: &[u32]) -> Vec<u8> {
        ids.iter().flat_map(|id| id.to_le_bytes()).collect()
    }

    #[test]
    fn one_list_or_a_list_of_lists() {
        for (text, lists) in [
            ("[1, 2]", vec![vec![1, 2]]),
            ("[]", vec![vec![]]),
            ("[[1,2],[ 3 ]]", vec![vec![1, 2], vec![3]]),
            ("[ [4294967295]\n,\t[] ]", vec![vec![u32::MAX], vec![]]),
        ] {
            let lists = lists.iter().map(|ids| packed(ids)).collect();
            assert_eq!(read_lists(text.as_bytes()), Some(lists), "{text}");
        }
    }

    #[test]
    fn anything_else_is_none() {
        for text in [
            "\"a\"",
            "null",
            "7",
            "{}",
            "\"[1]]",
            "[\"a\"]",
            "[[1],\"a\"]",
            "[[1],2]",
            "[1,[2]]",
            "[[1,[2]]]",
            "[[[1]]]",
            "[-1]",
            "[1.0]",
            "[1e2]",
            "[01]",
            "[4294967296]",
            "[true]",
            "[[1] [2]]",
            "[[1],]",
            "[1,]",
            "[[1]",
            "[[1]]x",
            "",
        ] {
            assert_eq!(read_lists(text.as_bytes()), None, "{text}");
        }
    }
}
