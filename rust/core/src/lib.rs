//! The pure logic of kvroute. No I/O, no Python, no unsafe code.
#![forbid(unsafe_code)]

pub mod body;
pub mod chain;
pub mod events;
pub mod gate;
pub mod http1;
pub mod ids;
pub mod index;
pub mod policy;
pub mod relay;
pub mod sse;
pub mod tiers;
