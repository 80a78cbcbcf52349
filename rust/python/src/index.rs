//! `PrefixIndex` and `Applied`: the prefix index for Python.

use kvroute_core::index::{Index, Report, SourceName};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::hash::{BuildHasher, RandomState};

/// Which engine holds which prefix, in which tier.
#[pyclass(frozen, module = "kvroute._core")]
pub struct PrefixIndex(Index);

#[pymethods]
impl PrefixIndex {
    #[new]
    #[pyo3(signature = (max_blocks, *, seed = None))]
    fn new(max_blocks: usize, seed: Option<u64>) -> Self {
        let seed = seed.unwrap_or_else(|| RandomState::new().hash_one(()));
        Self(Index::new(max_blocks, seed))
    }

    #[pyo3(signature = (endpoint, rank = 0))]
    fn add(&self, endpoint: &str, rank: u32) {
        self.0.add(&named(endpoint, rank));
    }

    #[pyo3(signature = (endpoint, rank, payload, /))]
    fn apply(
        &self,
        py: Python<'_>,
        endpoint: &str,
        rank: u32,
        payload: &Bound<'_, PyBytes>,
    ) -> PyResult<Applied> {
        let source = named(endpoint, rank);
        let payload = payload.as_bytes();
        py.detach(|| self.0.apply(&source, payload))
            .map(Applied)
            .map_err(|problem| PyValueError::new_err(problem.to_string()))
    }

    #[pyo3(signature = (endpoint, rank = 0))]
    fn forget(&self, py: Python<'_>, endpoint: &str, rank: u32) -> usize {
        let source = named(endpoint, rank);
        py.detach(|| self.0.forget(&source))
    }

    #[pyo3(signature = (tokens, /, *, lora = None, cache_salt = None))]
    fn r#match<'py>(
        &self,
        tokens: &Bound<'py, PyAny>,
        lora: Option<&str>,
        cache_salt: Option<&str>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let py = tokens.py();
        let listed;
        let bytes = if let Ok(bytes) = tokens.cast::<PyBytes>() {
            bytes.as_bytes()
        } else {
            let tokens = tokens.extract::<Vec<u32>>()?;
            listed = tokens
                .into_iter()
                .flat_map(u32::to_le_bytes)
                .collect::<Vec<_>>();
            &listed
        };
        if bytes.len() % size_of::<u32>() != 0 {
            return Err(PyValueError::new_err(
                "tokens as bytes must be little-endian u32s, four bytes each",
            ));
        }
        let matches = py.detach(|| self.0.matches(bytes, lora, cache_salt));
        let found = PyDict::new(py);
        for one in matches {
            let tiers = PyDict::new(py);
            for (tier, tokens) in &one.tokens {
                tiers.set_item(&**tier, tokens)?;
            }
            found.set_item((&*one.source.endpoint, one.source.rank), tiers)?;
        }
        Ok(found)
    }

    fn sizes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let sizes = PyDict::new(py);
        for one in py.detach(|| self.0.sizes()) {
            sizes.set_item((&*one.source.endpoint, one.source.rank), one.blocks)?;
        }
        Ok(sizes)
    }

    #[getter]
    fn allocated_bytes(&self, py: Python<'_>) -> usize {
        py.detach(|| self.0.bytes())
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __repr__(&self) -> String {
        format!("<PrefixIndex of {} blocks>", self.0.len())
    }
}

fn named(endpoint: &str, rank: u32) -> SourceName {
    SourceName {
        endpoint: endpoint.into(),
        rank,
    }
}

/// What one batch of events did.
#[pyclass(frozen, module = "kvroute._core")]
pub struct Applied(Report);

#[pymethods]
impl Applied {
    #[getter]
    fn time(&self) -> f64 {
        self.0.time
    }

    #[getter]
    fn rank(&self) -> Option<u32> {
        self.0.rank
    }

    #[getter]
    fn events(&self) -> usize {
        self.0.applied.events
    }

    #[getter]
    fn added(&self) -> usize {
        self.0.applied.added
    }

    #[getter]
    fn removed(&self) -> usize {
        self.0.applied.removed
    }

    #[getter]
    fn orphaned(&self) -> usize {
        self.0.applied.orphaned
    }

    #[getter]
    fn ignored(&self) -> usize {
        self.0.applied.ignored
    }

    #[getter]
    fn malformed(&self) -> usize {
        self.0.applied.malformed
    }

    #[getter]
    fn problem(&self) -> Option<&'static str> {
        self.0.problem.map(|problem| problem.0)
    }

    fn __repr__(&self) -> String {
        let applied = &self.0.applied;
        format!(
            "<Applied {} events: added={}, removed={}, orphaned={}, ignored={}, malformed={}>",
            applied.events,
            applied.added,
            applied.removed,
            applied.orphaned,
            applied.ignored,
            applied.malformed
        )
    }
}
