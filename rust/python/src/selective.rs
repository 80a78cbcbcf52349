//! `QueueGate`, `SelectivePolicy` and `LoadDecision`: the selective KV policy for Python.

use kvroute_core::gate::{self, GateState};
use kvroute_core::policy::{self, ClientLimit, Decision, Edit, LoadPolicy, OffloadPolicy};
use kvroute_core::tiers::{Loadable, Matcher, PromptTiers, TierFilter};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyInt, PyList, PyMapping};
use std::num::NonZeroU64;
use std::time::Duration;

const MAX_LOAD: &str = "max_load_tokens";
const MAX_OFFLOAD: &str = "max_offload_tokens";
const LOAD_TIERS: &str = "kv_load_tiers";

/// The smoothed waiting queue of one engine.
#[pyclass(frozen, module = "kvroute._core")]
pub struct QueueGate(gate::QueueGate);

#[pymethods]
impl QueueGate {
    #[new]
    fn new(max_waiting_requests: u32, max_age_seconds: f64) -> PyResult<Self> {
        let max_age = Duration::try_from_secs_f64(max_age_seconds)
            .map_err(|error| PyValueError::new_err(format!("max_age_seconds: {error}")))?;
        Ok(Self(gate::QueueGate::new(max_waiting_requests, max_age)))
    }

    fn observe(&self, waiting: f64, at: f64) -> bool {
        self.0.observe(waiting, at)
    }

    fn state(&self, now: f64) -> &'static str {
        self.0.state(now).word()
    }

    fn age(&self, now: f64) -> Option<f64> {
        self.0.age(now).map(|age| age.as_secs_f64())
    }

    #[getter]
    fn mean(&self) -> Option<f32> {
        self.0.mean()
    }
}

/// The settings of the policy.
#[pyclass(frozen, module = "kvroute._core")]
pub struct SelectivePolicy {
    load: LoadPolicy,
    offload: OffloadPolicy,
}

#[pymethods]
impl SelectivePolicy {
    #[new]
    #[pyo3(signature = (*, load_policy = "preserve", offload_policy = "preserve", min_external_reusable_tokens = 0))]
    fn new(
        load_policy: &str,
        offload_policy: &str,
        min_external_reusable_tokens: u64,
    ) -> PyResult<Self> {
        let load = match load_policy {
            "preserve" => LoadPolicy::Preserve,
            "disable" => LoadPolicy::Disable,
            "threshold" => LoadPolicy::Threshold(
                NonZeroU64::new(min_external_reusable_tokens).ok_or_else(|| {
                    PyValueError::new_err(
                        "load_policy threshold needs min_external_reusable_tokens of at least 1",
                    )
                })?,
            ),
            other => {
                return Err(PyValueError::new_err(format!(
                    "load_policy is preserve, disable or threshold, not {other:?}"
                )));
            }
        };
        let offload = match offload_policy {
            "preserve" => OffloadPolicy::Preserve,
            "disable" => OffloadPolicy::Disable,
            other => {
                return Err(PyValueError::new_err(format!(
                    "offload_policy is preserve or disable, not {other:?}"
                )));
            }
        };
        if (load, offload) == (LoadPolicy::Preserve, OffloadPolicy::Preserve) {
            return Err(PyValueError::new_err(
                "load_policy and offload_policy both preserve: no policy is active",
            ));
        }
        Ok(Self { load, offload })
    }

    #[pyo3(signature = (prompts, *, gate = None, now = 0.0, client = None, lengths = None))]
    fn decide(
        &self,
        prompts: Option<Vec<Bound<'_, PyMapping>>>,
        gate: Option<&QueueGate>,
        now: f64,
        client: Option<&Bound<'_, PyDict>>,
        lengths: Option<Vec<u64>>,
    ) -> PyResult<LoadDecision> {
        let sent = |name| client.map_or(Ok(None), |client| client.get_item(name));
        let filter = tier_filter(sent(LOAD_TIERS)?.as_ref())?;
        let max_load = client_limit(sent(MAX_LOAD)?.as_ref())?;
        let loadable = match prompts {
            Some(prompts) => loadable(prompts, lengths, &filter, max_load.cap())?,
            None => None,
        };
        let gate = gate.map_or(GateState::Off, |gate| gate.0.state(now));
        let decision = policy::decide(
            self.load,
            self.offload,
            loadable,
            gate,
            max_load,
            client_limit(sent(MAX_OFFLOAD)?.as_ref())?,
        );
        Ok(LoadDecision {
            decision,
            external: loadable.map(|loadable| loadable.external),
            gate,
        })
    }
}

/// What the policy decided for one request.
#[pyclass(frozen, module = "kvroute._core")]
pub struct LoadDecision {
    decision: Decision,
    external: Option<u64>,
    gate: GateState,
}

#[pymethods]
impl LoadDecision {
    #[getter]
    fn edits<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let edits = PyDict::new(py);
        for (name, edit) in [
            (MAX_LOAD, self.decision.load),
            (MAX_OFFLOAD, self.decision.offload),
        ] {
            match edit {
                Edit::Keep => {}
                Edit::Remove => edits.set_item(name, py.None())?,
                Edit::Zero => edits.set_item(name, 0)?,
            }
        }
        Ok(edits)
    }

    #[getter]
    fn reason(&self) -> &'static str {
        self.decision.load_reason.word()
    }

    #[getter]
    fn external_tokens(&self) -> Option<u64> {
        self.external
    }

    #[getter]
    fn gate(&self) -> &'static str {
        self.gate.word()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let external = self
            .external
            .map_or("None".to_owned(), |tokens| tokens.to_string());
        Ok(format!(
            "<LoadDecision {}: edits={}, external_tokens={external}, gate={}>",
            self.reason(),
            self.edits(py)?.repr()?,
            self.gate()
        ))
    }
}

/// What an engine would load for a request that reaches it with these parameters.
#[pyfunction]
#[pyo3(signature = (prompts, params, /, *, lengths = None))]
pub fn loadable_tokens(
    prompts: Vec<Bound<'_, PyMapping>>,
    params: &Bound<'_, PyDict>,
    lengths: Option<Vec<u64>>,
) -> PyResult<Option<u64>> {
    let filter = tier_filter(params.get_item(LOAD_TIERS)?.as_ref())?;
    let limit = client_limit(params.get_item(MAX_LOAD)?.as_ref())?;
    let loadable = loadable(prompts, lengths, &filter, limit.most())?;
    Ok(loadable.map(|loadable| loadable.within_cap))
}

fn loadable(
    prompts: Vec<Bound<'_, PyMapping>>,
    lengths: Option<Vec<u64>>,
    filter: &TierFilter,
    cap: Option<u64>,
) -> PyResult<Option<Loadable>> {
    let lengths: Vec<Option<u64>> = match lengths {
        Some(lengths) => lengths.into_iter().map(Some).collect(),
        None => vec![None; prompts.len()],
    };
    if lengths.len() != prompts.len() {
        return Err(PyValueError::new_err(
            "lengths must have an entry for each prompt",
        ));
    }
    let prompts = prompts.into_iter().zip(lengths).map(|(prompt, length)| {
        let tokens = prompt.items()?.extract()?;
        Ok(PromptTiers { tokens, length })
    });
    let prompts = prompts.collect::<PyResult<Vec<_>>>()?;
    Ok(Loadable::of(&prompts, filter, cap))
}

/// `kv_load_tiers` as the JSON value that the client sent.
fn tier_filter(value: Option<&Bound<'_, PyAny>>) -> PyResult<TierFilter> {
    let Some(list) = value.and_then(|value| value.cast::<PyList>().ok()) else {
        return Ok(TierFilter::All);
    };
    let entries = list.iter().map(|entry| {
        let Ok(entry) = entry.cast::<PyDict>() else {
            return Ok(None);
        };
        let word = |name| -> PyResult<Result<Option<String>, ()>> {
            Ok(match entry.get_item(name)? {
                Some(value) if !value.is_none() => value.extract().map(Some).map_err(drop),
                _ => Ok(None),
            })
        };
        Ok(match (word("medium")?, word("locality")?) {
            (Ok(medium), Ok(locality)) => Matcher::new(medium.as_deref(), locality.as_deref()),
            _ => None,
        })
    });
    Ok(TierFilter::of_list(entries.collect::<PyResult<_>>()?))
}

/// A limit as vLLM reads it: an integer of at least 0, and a boolean is none.
fn client_limit(value: Option<&Bound<'_, PyAny>>) -> PyResult<ClientLimit> {
    let Some(value) = value.filter(|value| !value.is_none()) else {
        return Ok(ClientLimit::Absent);
    };
    if value.is_instance_of::<PyBool>() || !value.is_instance_of::<PyInt>() || value.lt(0)? {
        return Ok(ClientLimit::Invalid);
    }
    // What is too large for 64 bits is beyond any prompt.
    Ok(ClientLimit::Tokens(value.extract().unwrap_or(u64::MAX)))
}
