//! The pure logic of kvroute. No I/O, no Python, no unsafe code.
#![forbid(unsafe_code)]

pub mod body;
pub mod chain;
pub mod http1;
pub mod relay;
pub mod sse;
