//! KV event batches of vLLM as typed events.
//!
//! A batch is the msgpack array `[time, events, rank]`. An event is a map with `type` since 0.32, and before that an array
//! with the type in front and its members in a fixed order, longer with each release. Both are read, what is unknown is
//! passed over, and an event that makes no sense costs nothing but itself.

mod extra;
mod reader;

pub use extra::of_prompt as extra_of_prompt;
pub use reader::Malformed;

use crate::tiers;
use reader::{Reader, Value};
use std::borrow::Cow;
use xxhash_rust::xxh3::xxh3_64;

/// An engine's name for a block: opaque, and of that engine, rank and group alone.
///
/// Integers are taken as they are. Releases that send 32 bytes have them hashed, which saves memory and is as good: engines
/// do not choose names to collide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EngineHash(pub u64);

/// One message of an engine.
#[derive(Debug, Default, PartialEq)]
pub struct Batch<'a> {
    /// When it was made, in seconds of the engine's clock; 0 if it does not say.
    pub time: f64,
    /// The data-parallel rank, if it says.
    pub rank: Option<u32>,
    /// What could be read, in order.
    pub events: Vec<Event<'a>>,
    /// Events that could not.
    pub malformed: usize,
    /// What was wrong with the first of those.
    pub problem: Option<Malformed>,
    /// Events of types that are not known.
    pub unknown: usize,
}

/// One change of an engine's cache.
#[derive(Debug, PartialEq)]
pub enum Event<'a> {
    /// Blocks are there.
    Stored(Stored<'a>),
    /// Blocks are gone from a tier.
    Removed(Removed<'a>),
    /// All blocks of the rank are gone.
    Cleared,
}

/// Blocks that are in a tier, in the order of the sequence.
#[derive(Debug, PartialEq)]
pub struct Stored<'a> {
    /// Their names.
    pub hashes: Vec<EngineHash>,
    /// The block before the first one; `None` at the start of a sequence.
    pub parent: Option<EngineHash>,
    /// Their tokens, `block_size` each; none in a placeholder, which names blocks that were announced before.
    pub tokens: Vec<u32>,
    /// Tokens in a block; 0 in a placeholder.
    pub block_size: usize,
    /// [`tiers::name`].
    pub tier: Cow<'a, str>,
    /// For each block what else it depends on, [`extra_of_prompt`]; `None` if the event does not say.
    pub extra: Option<Vec<Vec<u8>>>,
    /// The adapter's name, for events that have no extra keys.
    pub lora: Option<Cow<'a, str>>,
    /// The KV cache group.
    pub group: Group,
}

/// Blocks that left a tier.
#[derive(Debug, PartialEq)]
pub struct Removed<'a> {
    /// Their names.
    pub hashes: Vec<EngineHash>,
    /// [`tiers::name`].
    pub tier: Cow<'a, str>,
    /// The KV cache group.
    pub group: Group,
}

/// A KV cache group of an engine, as an event tells it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Group {
    /// 0 in releases that do not number them.
    pub number: u32,
    /// Whether its blocks hold the whole prefix (full attention, MLA); `None` if the event does not say.
    pub whole_prefix: Option<bool>,
}

/// Reads a batch.
///
/// # Errors
/// When it is no batch at all. Events that cannot be read are counted in it instead.
pub fn decode(payload: &[u8]) -> Result<Batch<'_>, Malformed> {
    let mut reader = Reader::new(payload);
    let Value::Array(members @ 2..) = reader.next()? else {
        return Err(Malformed(
            "a batch is an array of a time, events and a rank",
        ));
    };
    let mut batch = Batch {
        time: time(reader.next()?),
        ..Batch::default()
    };
    let count = reader
        .array("the events of a batch are an array")?
        .unwrap_or(0);
    for read in 0..count {
        let start = reader;
        match event(&mut reader) {
            Ok(Some(event)) => batch.events.push(event),
            Ok(None) => batch.unknown += 1,
            Err(problem) => {
                if is_of_a_later_type(start) {
                    batch.unknown += 1;
                } else {
                    batch.malformed += 1;
                    batch.problem.get_or_insert(problem);
                }
                reader = start;
                if reader.skip().is_err() {
                    // Where the next event starts cannot be known.
                    batch.malformed += count - read - 1;
                    return Ok(batch);
                }
            }
        }
    }
    if members > 2 {
        // A batch whose end is cut off has its events all the same.
        batch.rank = reader.small("a rank is a number").unwrap_or(None);
    }
    Ok(batch)
}

#[allow(clippy::cast_precision_loss)] // seconds
fn time(value: Value<'_>) -> f64 {
    match value {
        Value::Float(time) => time,
        Value::Uint(time) => time as f64,
        _ => 0.0,
    }
}

const KINDS: [&str; 3] = ["BlockStored", "BlockRemoved", "AllBlocksCleared"];

/// The members of events that are read.
#[derive(Clone, Copy)]
enum Member {
    Type,
    Hashes,
    Parent,
    Tokens,
    BlockSize,
    LoraId,
    Medium,
    LoraName,
    ExtraKeys,
    Group,
    Kind,
    Locality,
    Unknown,
}

/// The order in which arrays have them; none has more that is read.
const STORED: [Member; 10] = [
    Member::Hashes,
    Member::Parent,
    Member::Tokens,
    Member::BlockSize,
    Member::LoraId,
    Member::Medium,
    Member::LoraName,
    Member::ExtraKeys,
    Member::Group,
    Member::Kind,
];
const REMOVED: [Member; 3] = [Member::Hashes, Member::Medium, Member::Group];

impl Member {
    fn named(name: &[u8]) -> Self {
        match name {
            b"type" => Self::Type,
            b"block_hashes" => Self::Hashes,
            b"parent_block_hash" => Self::Parent,
            b"token_ids" => Self::Tokens,
            b"block_size" => Self::BlockSize,
            b"lora_id" => Self::LoraId,
            b"medium" => Self::Medium,
            b"lora_name" => Self::LoraName,
            b"extra_keys" => Self::ExtraKeys,
            b"group_idx" => Self::Group,
            b"kv_cache_spec_kind" => Self::Kind,
            b"locality" => Self::Locality,
            _ => Self::Unknown,
        }
    }
}

/// Everything that an event may have.
#[derive(Default)]
struct Members<'a> {
    kind: Option<&'a str>,
    hashes: Option<Vec<EngineHash>>,
    parent: Option<EngineHash>,
    tokens: Vec<u32>,
    block_size: u32,
    lora_id: Option<u32>,
    lora_name: Option<&'a str>,
    medium: Option<&'a str>,
    locality: Option<&'a str>,
    /// Read last, for they are told apart by the adapter's name.
    extra_keys: Option<Reader<'a>>,
    group: Option<u32>,
    whole_prefix: Option<bool>,
}

fn event<'a>(reader: &mut Reader<'a>) -> Result<Option<Event<'a>>, Malformed> {
    let mut members = Members::default();
    match reader.next()? {
        Value::Map(count) => {
            for _ in 0..count {
                let Value::Str(name) = reader.next()? else {
                    return Err(Malformed("a member of an event has no name"));
                };
                members.read(Member::named(name), reader)?;
            }
        }
        Value::Array(count @ 1..) => {
            members.read(Member::Type, reader)?;
            let order: &[Member] = match members.kind {
                Some("BlockStored") => &STORED,
                Some("BlockRemoved") => &REMOVED,
                _ => &[],
            };
            for index in 0..count - 1 {
                members.read(order.get(index).copied().unwrap_or(Member::Unknown), reader)?;
            }
        }
        _ => return Err(Malformed("an event is a map or an array")),
    }
    members.event()
}

/// Whether an event that could not be read is none of those that must be.
fn is_of_a_later_type(mut event: Reader<'_>) -> bool {
    let mut kind = || {
        let members = match event.next()? {
            Value::Map(count) => count,
            Value::Array(1..) => return event.text(""),
            _ => 0,
        };
        for _ in 0..members {
            if event.next()? == Value::Str(b"type") {
                return event.text("");
            }
            event.skip()?;
        }
        Ok(None)
    };
    matches!(kind(), Ok(Some(kind)) if !KINDS.contains(&kind))
}

impl<'a> Members<'a> {
    fn read(&mut self, member: Member, reader: &mut Reader<'a>) -> Result<(), Malformed> {
        match member {
            Member::Type => self.kind = reader.text("the type of an event is text")?,
            Member::Hashes => self.hashes = hashes(reader)?,
            Member::Parent => self.parent = hash(reader.next()?)?,
            Member::Tokens => self.tokens = tokens(reader)?,
            Member::BlockSize => {
                self.block_size = reader.small("block_size is no size")?.unwrap_or(0);
            }
            Member::LoraId => self.lora_id = reader.small("lora_id is no number")?,
            Member::Medium => self.medium = reader.text("medium is text")?,
            Member::LoraName => self.lora_name = reader.text("lora_name is text")?,
            Member::ExtraKeys => {
                self.extra_keys = Some(*reader);
                reader.skip()?;
            }
            Member::Group => self.group = reader.small("group_idx is no number")?,
            Member::Kind => {
                self.whole_prefix = reader.text("kv_cache_spec_kind is text")?.map(|kind| {
                    matches!(
                        kind,
                        "full_attention" | "mla_attention" | "sink_full_attention"
                    )
                });
            }
            Member::Locality => self.locality = reader.text("locality is text")?,
            Member::Unknown => reader.skip()?,
        }
        Ok(())
    }

    fn event(self) -> Result<Option<Event<'a>>, Malformed> {
        let group = Group {
            number: self.group.unwrap_or(0),
            whole_prefix: self.whole_prefix,
        };
        let tier = tiers::name(self.medium, self.locality);
        match self.kind {
            Some("BlockStored") => {}
            Some("BlockRemoved") => {
                let hashes = self
                    .hashes
                    .ok_or(Malformed("a removal has no block_hashes"))?;
                return Ok(Some(Event::Removed(Removed {
                    hashes,
                    tier,
                    group,
                })));
            }
            Some("AllBlocksCleared") => return Ok(Some(Event::Cleared)),
            Some(_) => return Ok(None),
            None => return Err(Malformed("an event has no type")),
        }
        let hashes = self
            .hashes
            .ok_or(Malformed("a store has no block_hashes"))?;
        let block_size = self.block_size as usize;
        if Some(self.tokens.len()) != hashes.len().checked_mul(block_size) {
            return Err(Malformed(
                "a store has not block_size tokens for each block",
            ));
        }
        let extra = match self.extra_keys {
            Some(mut keys) => match keys.array("extra_keys are an array")? {
                None => None,
                Some(count) if count == hashes.len() => Some(
                    (0..count)
                        .map(|_| extra::read(&mut keys, self.lora_name))
                        .collect::<Result<_, _>>()?,
                ),
                Some(_) => return Err(Malformed("extra_keys have not an entry for each block")),
            },
            None => None,
        };
        // A number is no name that a client could ask for, but it still tells adapters apart.
        let by_id = || self.lora_id.map(|id| Cow::Owned(format!("#{id}")));
        Ok(Some(Event::Stored(Stored {
            hashes,
            parent: self.parent,
            tokens: self.tokens,
            block_size,
            tier,
            extra,
            lora: self.lora_name.map(Cow::Borrowed).or_else(by_id),
            group,
        })))
    }
}

fn hashes(reader: &mut Reader<'_>) -> Result<Option<Vec<EngineHash>>, Malformed> {
    let Some(count) = reader.array("block_hashes are an array")? else {
        return Ok(None);
    };
    let hash = |_| hash(reader.next()?)?.ok_or(Malformed("a block hash is nil"));
    (0..count).map(hash).collect::<Result<_, _>>().map(Some)
}

fn hash(value: Value<'_>) -> Result<Option<EngineHash>, Malformed> {
    match value {
        Value::Uint(number) => Ok(Some(EngineHash(number))),
        Value::Int(number) => Ok(Some(EngineHash(u64::from_ne_bytes(number.to_ne_bytes())))),
        Value::Bin(bytes) | Value::Str(bytes) => Ok(Some(EngineHash(xxh3_64(bytes)))),
        Value::Nil => Ok(None),
        _ => Err(Malformed("a block hash is a number or bytes")),
    }
}

fn tokens(reader: &mut Reader<'_>) -> Result<Vec<u32>, Malformed> {
    const WRONG: &str = "token_ids are numbers below 2^32";
    let count = reader.array(WRONG)?.unwrap_or(0);
    let mut tokens = Vec::with_capacity(count);
    for _ in 0..count {
        tokens.push(reader.small(WRONG)?.ok_or(Malformed(WRONG))?);
    }
    Ok(tokens)
}
