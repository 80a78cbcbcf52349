//! The binding of kvroute-core to Python, thin: types are converted here, decisions are made in the core.

mod body;
mod chain;
mod index;
mod memory;
mod relay;
mod selective;
mod tap;

use pyo3::prelude::*;

/// The compiled part of kvroute.
#[pymodule]
mod _core {
    #[pymodule_export]
    use crate::body::{Body, BodyError, Edits};
    #[pymodule_export]
    use crate::chain::chain_blocks;
    #[pymodule_export]
    use crate::index::{Applied, PrefixIndex};

    #[pymodule_export]
    use crate::relay::EngineResponse;
    #[pymodule_export]
    use crate::selective::{LoadDecision, QueueGate, SelectivePolicy, loadable_tokens};
    #[pymodule_export]
    use crate::tap::{Tap, hide_in_document};

    #[pymodule_export]
    const DEBUG_BUILD: bool = cfg!(debug_assertions);
}
