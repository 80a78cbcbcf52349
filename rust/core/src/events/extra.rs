//! What a block's KV depends on besides tokens, as canonical bytes: equal bytes, equal dependence.
//!
//! Engines tell it with each block as `extra_keys`: the `LoRA` name, `[media id, offset]` pairs, the cache salt (on the
//! first block), digests of prompt embeddings, without a word on which is which. A name that equals the event's
//! `lora_name` is tagged as such, so that an adapter and a salt of the same name do not meet.

use super::reader::{Malformed, Reader, Value};

const LORA: u8 = b'l';
const TEXT: u8 = b's';
const BYTES: u8 = b'b';
const NUMBER: u8 = b'n';
const LIST: u8 = b'[';

const WRONG: Malformed = Malformed("extra_keys are not lists of names and numbers");

/// Deeper than any engine nests them.
const MAX_DEPTH: usize = 4;

/// The bytes for a prompt's block with this adapter and this salt.
///
/// The salt is part of the first block alone; all others have it by their parent.
#[must_use]
pub fn of_prompt(lora: Option<&str>, salt: Option<&str>, block: usize) -> Vec<u8> {
    let mut extra = Vec::new();
    if let Some(lora) = lora {
        write(&mut extra, LORA, lora.as_bytes());
    }
    if let (0, Some(salt)) = (block, salt) {
        write(&mut extra, TEXT, salt.as_bytes());
    }
    extra
}

/// Reads one block's entry.
pub(super) fn read(reader: &mut Reader<'_>, lora: Option<&str>) -> Result<Vec<u8>, Malformed> {
    let mut extra = Vec::new();
    for index in 0..reader.array(WRONG.0)?.unwrap_or(0) {
        let lora = lora.filter(|_| index == 0);
        item(reader, lora, MAX_DEPTH, &mut extra)?;
    }
    Ok(extra)
}

fn item(
    reader: &mut Reader<'_>,
    lora: Option<&str>,
    depth: usize,
    extra: &mut Vec<u8>,
) -> Result<(), Malformed> {
    match reader.next()? {
        Value::Str(text) if lora.is_some_and(|lora| lora.as_bytes() == text) => {
            write(extra, LORA, text);
        }
        Value::Str(text) => write(extra, TEXT, text),
        Value::Bin(bytes) => write(extra, BYTES, bytes),
        Value::Uint(number) => write(extra, NUMBER, &i128::from(number).to_le_bytes()),
        Value::Int(number) => write(extra, NUMBER, &i128::from(number).to_le_bytes()),
        Value::Array(count) if depth > 0 => {
            write(extra, LIST, &(count as u64).to_le_bytes());
            for _ in 0..count {
                item(reader, None, depth - 1, extra)?;
            }
        }
        _ => return Err(WRONG),
    }
    Ok(())
}

fn write(extra: &mut Vec<u8>, tag: u8, bytes: &[u8]) {
    extra.push(tag);
    extra.extend((bytes.len() as u64).to_le_bytes());
    extra.extend_from_slice(bytes);
}
