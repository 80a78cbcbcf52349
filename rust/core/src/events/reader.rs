//! A cursor over msgpack, with nothing trusted: no length is believed beyond the bytes that are there.

use rmp::Marker;

/// Why something could not be read. The text is for a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Malformed(pub &'static str);

const CUT: Malformed = Malformed("the msgpack ends too early");

/// One msgpack value; arrays and maps are their heads, with their elements still to come.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'a> {
    Nil,
    Bool(bool),
    Uint(u64),
    /// Below zero.
    Int(i64),
    Float(f64),
    Str(&'a [u8]),
    Bin(&'a [u8]),
    /// Elements.
    Array(usize),
    /// Pairs.
    Map(usize),
    /// An extension type, already passed.
    Ext,
}

#[derive(Debug, Clone, Copy)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub fn next(&mut self) -> Result<Value<'a>, Malformed> {
        let marker = Marker::from_u8(self.byte()?);
        Ok(match marker {
            Marker::FixPos(number) => Value::Uint(number.into()),
            Marker::U8 => Value::Uint(self.byte()?.into()),
            Marker::U16 => Value::Uint(u16::from_be_bytes(self.bytes()?).into()),
            Marker::U32 => Value::Uint(u32::from_be_bytes(self.bytes()?).into()),
            Marker::U64 => Value::Uint(u64::from_be_bytes(self.bytes()?)),
            Marker::FixNeg(number) => signed(number.into()),
            Marker::I8 => signed(i8::from_be_bytes(self.bytes()?).into()),
            Marker::I16 => signed(i16::from_be_bytes(self.bytes()?).into()),
            Marker::I32 => signed(i32::from_be_bytes(self.bytes()?).into()),
            Marker::I64 => signed(i64::from_be_bytes(self.bytes()?)),
            Marker::F32 => Value::Float(f32::from_be_bytes(self.bytes()?).into()),
            Marker::F64 => Value::Float(f64::from_be_bytes(self.bytes()?)),
            Marker::Null => Value::Nil,
            Marker::True => Value::Bool(true),
            Marker::False => Value::Bool(false),
            Marker::FixStr(length) => Value::Str(self.take(length.into())?),
            Marker::Str8 | Marker::Str16 | Marker::Str32 => {
                let length = self.length(marker)?;
                Value::Str(self.take(length)?)
            }
            Marker::Bin8 | Marker::Bin16 | Marker::Bin32 => {
                let length = self.length(marker)?;
                Value::Bin(self.take(length)?)
            }
            Marker::FixArray(count) => Value::Array(self.count(count.into(), 1)?),
            Marker::Array16 | Marker::Array32 => {
                let count = self.length(marker)?;
                Value::Array(self.count(count, 1)?)
            }
            Marker::FixMap(count) => Value::Map(self.count(count.into(), 2)?),
            Marker::Map16 | Marker::Map32 => {
                let count = self.length(marker)?;
                Value::Map(self.count(count, 2)?)
            }
            Marker::FixExt1 => self.ext(1)?,
            Marker::FixExt2 => self.ext(2)?,
            Marker::FixExt4 => self.ext(4)?,
            Marker::FixExt8 => self.ext(8)?,
            Marker::FixExt16 => self.ext(16)?,
            Marker::Ext8 | Marker::Ext16 | Marker::Ext32 => {
                let length = self.length(marker)?;
                self.ext(length)?
            }
            Marker::Reserved => return Err(Malformed("the msgpack has a byte that means nothing")),
        })
    }

    /// Passes one value with all that is in it.
    pub fn skip(&mut self) -> Result<(), Malformed> {
        let mut left: u64 = 1;
        while left > 0 {
            left = left - 1
                + match self.next()? {
                    Value::Array(count) => count as u64,
                    Value::Map(count) => 2 * count as u64,
                    _ => 0,
                };
        }
        Ok(())
    }

    /// The elements of an array, `None` for nil.
    pub fn array(&mut self, otherwise: &'static str) -> Result<Option<usize>, Malformed> {
        match self.next()? {
            Value::Array(count) => Ok(Some(count)),
            Value::Nil => Ok(None),
            _ => Err(Malformed(otherwise)),
        }
    }

    /// Text, `None` for nil.
    pub fn text(&mut self, otherwise: &'static str) -> Result<Option<&'a str>, Malformed> {
        match self.next()? {
            Value::Str(text) => std::str::from_utf8(text)
                .map(Some)
                .map_err(|_| Malformed(otherwise)),
            Value::Nil => Ok(None),
            _ => Err(Malformed(otherwise)),
        }
    }

    /// A number that fits 32 bits without a sign, `None` for nil.
    pub fn small(&mut self, otherwise: &'static str) -> Result<Option<u32>, Malformed> {
        match self.next()? {
            Value::Uint(number) => u32::try_from(number)
                .map(Some)
                .map_err(|_| Malformed(otherwise)),
            Value::Nil => Ok(None),
            _ => Err(Malformed(otherwise)),
        }
    }

    fn byte(&mut self) -> Result<u8, Malformed> {
        self.bytes().map(|[byte]: [u8; 1]| byte)
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (bytes, rest) = self.rest.split_first_chunk().ok_or(CUT)?;
        self.rest = rest;
        Ok(*bytes)
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.rest.split_at_checked(length).ok_or(CUT)?;
        self.rest = rest;
        Ok(taken)
    }

    fn length(&mut self, marker: Marker) -> Result<usize, Malformed> {
        Ok(match marker {
            Marker::Str8 | Marker::Bin8 | Marker::Ext8 => self.byte()?.into(),
            Marker::Str16 | Marker::Bin16 | Marker::Ext16 | Marker::Array16 | Marker::Map16 => {
                u16::from_be_bytes(self.bytes()?).into()
            }
            _ => usize::try_from(u32::from_be_bytes(self.bytes()?)).map_err(|_| CUT)?,
        })
    }

    /// A count of elements that have at least `width` bytes each: what cannot be there is refused before it is awaited.
    fn count(&self, count: usize, width: usize) -> Result<usize, Malformed> {
        if count > self.rest.len() / width {
            return Err(CUT);
        }
        Ok(count)
    }

    fn ext(&mut self, length: usize) -> Result<Value<'a>, Malformed> {
        self.byte()?;
        self.take(length)?;
        Ok(Value::Ext)
    }
}

fn signed(number: i64) -> Value<'static> {
    u64::try_from(number).map_or(Value::Int(number), Value::Uint)
}
