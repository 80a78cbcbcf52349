//! The selective KV policy: may this request load KV from outer tiers, and may it offload there?
//!
//! A pure function of the settings, of what is known about the engine that would load, and of what the client asked for.
//! Its outcome is edits of `max_load_tokens` and `max_offload_tokens` in the request's `kv_transfer_params`, for that
//! engine. vLLM honours the first since 0.31 and the second since 0.29; older releases ignore them without a word.

use crate::gate::GateState;
use crate::tiers::Loadable;
use std::num::NonZeroU64;

/// What to do with loads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadPolicy {
    /// The client's own limit stands.
    Preserve,
    /// Nothing is loaded.
    Disable,
    /// Loads are for requests with at least this many tokens outside of the GPU, while the gate is not closed.
    Threshold(NonZeroU64),
}

/// What to do with offloads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OffloadPolicy {
    /// The client's own limit stands.
    Preserve,
    /// Nothing is offloaded.
    Disable,
}

/// A limit as the client sent it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ClientLimit {
    /// None.
    #[default]
    Absent,
    /// An integer of at least 0.
    Tokens(u64),
    /// Something else, which engines ignore with a warning.
    Invalid,
}

impl ClientLimit {
    /// A cap that lets something through.
    #[must_use]
    pub const fn cap(self) -> Option<u64> {
        match self {
            Self::Tokens(cap) if cap > 0 => Some(cap),
            _ => None,
        }
    }

    /// The most tokens that an engine lets through which gets this.
    #[must_use]
    pub const fn most(self) -> Option<u64> {
        match self {
            Self::Tokens(most) => Some(most),
            Self::Absent | Self::Invalid => None,
        }
    }
}

/// What becomes of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Edit {
    /// It stays as the client sent it, or absent: the body is not touched for it.
    Keep,
    /// It is taken out, which brings the engine's default back: no limit.
    Remove,
    /// It is set to 0: none.
    Zero,
}

/// Why a load was decided as it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadReason {
    /// The policy leaves loads to the client.
    Preserved,
    /// The policy forbids all.
    Disabled,
    /// Enough tokens are outside of the GPU.
    Allowed,
    /// Too few are.
    BelowThreshold,
    /// Enough are, but the client's own cap would load too few of them.
    ClientCap,
    /// Enough are, but too many requests wait.
    GateClosed,
    /// Nothing is known about the engine's tiers: the client's limit stands.
    NoEvidence,
}

impl LoadReason {
    /// The reason in a word, for metrics.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Preserved => "preserved",
            Self::Disabled => "disabled",
            Self::Allowed => "allowed",
            Self::BelowThreshold => "below_threshold",
            Self::ClientCap => "client_cap",
            Self::GateClosed => "gate_closed",
            Self::NoEvidence => "no_evidence",
        }
    }
}

/// The outcome for one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// Of `max_load_tokens`.
    pub load: Edit,
    /// Why.
    pub load_reason: LoadReason,
    /// Of `max_offload_tokens`.
    pub offload: Edit,
}

/// Decides about one request.
///
/// `loadable` is what the chosen engine could load, within [`ClientLimit::cap`] of `max_load`; `None` without evidence.
/// `gate` is its queue.
///
/// A client's cap means that no more would be loaded, so it is what the cap lets through that is compared with the
/// threshold; where loading is allowed, the cap stays. A 0 of the client is what the policy exists to decide: allowing
/// takes it out. Forbidding overrides any cap.
#[must_use]
pub fn decide(
    load: LoadPolicy,
    offload: OffloadPolicy,
    loadable: Option<Loadable>,
    gate: GateState,
    max_load: ClientLimit,
    max_offload: ClientLimit,
) -> Decision {
    let load_reason = match (load, loadable) {
        (LoadPolicy::Preserve, _) => LoadReason::Preserved,
        (LoadPolicy::Disable, _) => LoadReason::Disabled,
        (LoadPolicy::Threshold(_), None) => LoadReason::NoEvidence,
        (LoadPolicy::Threshold(least), Some(loadable)) if loadable.external < least.get() => {
            LoadReason::BelowThreshold
        }
        (LoadPolicy::Threshold(least), Some(loadable)) if loadable.within_cap < least.get() => {
            LoadReason::ClientCap
        }
        (LoadPolicy::Threshold(_), _) if gate == GateState::Closed => LoadReason::GateClosed,
        (LoadPolicy::Threshold(_), _) => LoadReason::Allowed,
    };
    let load = match load_reason {
        LoadReason::Preserved | LoadReason::NoEvidence => Edit::Keep,
        LoadReason::Allowed if max_load == ClientLimit::Absent || max_load.cap().is_some() => {
            Edit::Keep
        }
        LoadReason::Allowed => Edit::Remove,
        LoadReason::Disabled
        | LoadReason::BelowThreshold
        | LoadReason::ClientCap
        | LoadReason::GateClosed => zero(max_load),
    };
    let offload = match offload {
        OffloadPolicy::Preserve => Edit::Keep,
        OffloadPolicy::Disable => zero(max_offload),
    };
    Decision {
        load,
        load_reason,
        offload,
    }
}

fn zero(limit: ClientLimit) -> Edit {
    if limit == ClientLimit::Tokens(0) {
        Edit::Keep
    } else {
        Edit::Zero
    }
}
