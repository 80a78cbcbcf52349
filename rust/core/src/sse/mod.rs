//! What the gateway needs to know from an engine's answer, and what its client must not see of it.
//!
//! [`Scanner`] follows a stream of server-sent events (the WHATWG HTML standard's event stream format) over reads that
//! are cut anywhere; [`Document`] does the same for an answer that is one JSON object. Both share [`Facts`] and the
//! [`Rules`] of what is hidden, and neither builds a value: they walk the members of an object and skip the rest.

mod document;
mod event;
mod facts;
mod json;
mod object;
mod rules;
mod scanner;

pub use document::{Document, Unreadable};
pub use facts::{Facts, Ids};
pub use object::{Verdict, inspect};
pub use rules::{Cut, Rules, TokenIds};
pub use scanner::{EventTooLarge, Pass, Scanner};
