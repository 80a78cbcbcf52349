//! `PrefixIndex` and `Applied`: the prefix index for Python.

use crate::memory;
use kvroute_core::index::{Index, Report, SourceName};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Blocks that are forgotten at once, in the caller's time: a millisecond.
const PURGE_AT_ONCE: usize = 4096;

/// Blocks of which the memory is worth a walk through the allocator: 2 MB and more.
const GIVE_BACK_ABOVE: usize = 1 << 15;

/// Blocks of an index that is kept to its limit at once, in the caller's time: some 5 ms.
const TRIM_AT_ONCE: usize = 1 << 16;

/// Which engine holds which prefix, in which tier.
#[pyclass(frozen, module = "kvroute._core")]
pub struct PrefixIndex {
    index: Arc<Index>,
    /// Its blocks at most, since memory was last given back.
    peak: AtomicUsize,
    /// A thread keeps it to its limit.
    trimming: Arc<AtomicBool>,
}

impl PrefixIndex {
    /// Keeps the index to its limit; a large one in a thread, since its caller has requests to serve.
    fn trim(&self) {
        if !self.index.is_over_the_limit() {
            return;
        }
        if self.index.len() <= TRIM_AT_ONCE {
            self.index.keep_to_the_limit();
        } else if !self.trimming.swap(true, Ordering::Relaxed) {
            let (index, trimming) = (Arc::clone(&self.index), Arc::clone(&self.trimming));
            std::thread::spawn(move || {
                index.keep_to_the_limit();
                trimming.store(false, Ordering::Relaxed);
            });
        }
    }

    /// Gives memory back when the index has become much smaller: its many small tables leave it with the allocator.
    fn give_back(&self) {
        let blocks = self.index.len();
        let peak = self.peak.fetch_max(blocks, Ordering::Relaxed);
        let is_worth_it = peak > GIVE_BACK_ABOVE && blocks < peak / 2;
        if is_worth_it && self.peak.swap(blocks, Ordering::Relaxed) == peak {
            std::thread::spawn(memory::give_back);
        }
    }
}

#[pymethods]
impl PrefixIndex {
    #[new]
    #[pyo3(signature = (max_blocks, *, seed = None))]
    fn new(max_blocks: usize, seed: Option<u64>) -> Self {
        let seed = seed.unwrap_or_else(|| RandomState::new().hash_one(()));
        Self {
            index: Arc::new(Index::new(max_blocks, seed)),
            peak: AtomicUsize::new(0),
            trimming: Arc::default(),
        }
    }

    #[pyo3(signature = (endpoint, rank = 0))]
    fn add(&self, endpoint: &str, rank: u32) {
        self.index.add(&named(endpoint, rank));
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
        let apply = || {
            let applied = self.index.apply(&source, payload);
            self.trim();
            self.give_back();
            applied
        };
        py.detach(apply)
            .map(Applied)
            .map_err(|problem| PyValueError::new_err(problem.to_string()))
    }

    #[pyo3(signature = (endpoint, rank = 0))]
    fn forget(&self, py: Python<'_>, endpoint: &str, rank: u32) -> usize {
        let source = named(endpoint, rank);
        py.detach(|| {
            let forgotten = self.index.forget(&source);
            let blocks = forgotten.blocks();
            if blocks <= PURGE_AT_ONCE {
                self.index.purge(forgotten);
            } else {
                let index = Arc::clone(&self.index);
                std::thread::spawn(move || {
                    index.purge(forgotten);
                    memory::give_back();
                });
            }
            blocks
        })
    }

    #[pyo3(signature = (endpoint, rank, tokens, /, *, until, lora = None, cache_salt = None))]
    fn assume(
        &self,
        endpoint: &str,
        rank: u32,
        tokens: &Bound<'_, PyAny>,
        until: f64,
        lora: Option<&str>,
        cache_salt: Option<&str>,
    ) -> PyResult<usize> {
        let source = named(endpoint, rank);
        let tokens = Tokens::of(tokens)?;
        let bytes = tokens.bytes();
        let assume = || self.index.assume(&source, bytes, lora, cache_salt, until);
        Ok(tokens.py().detach(assume))
    }

    fn expire(&self, py: Python<'_>, now: f64) -> usize {
        py.detach(|| self.index.expire(now))
    }

    #[pyo3(signature = (tokens, /, *, lora = None, cache_salt = None))]
    fn r#match<'py>(
        &self,
        tokens: &Bound<'py, PyAny>,
        lora: Option<&str>,
        cache_salt: Option<&str>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let py = tokens.py();
        let tokens = Tokens::of(tokens)?;
        let bytes = tokens.bytes();
        let matches = py.detach(|| self.index.matches(bytes, lora, cache_salt));
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
        for one in py.detach(|| self.index.sizes()) {
            sizes.set_item((&*one.source.endpoint, one.source.rank), one.blocks)?;
        }
        Ok(sizes)
    }

    #[getter]
    fn allocated_bytes(&self, py: Python<'_>) -> usize {
        py.detach(|| self.index.bytes())
    }

    #[pyo3(signature = (endpoint, rank = 0))]
    fn is_partial(&self, endpoint: &str, rank: u32) -> bool {
        self.index.is_partial(&named(endpoint, rank))
    }

    fn __len__(&self) -> usize {
        self.index.len()
    }

    fn __repr__(&self) -> String {
        format!("<PrefixIndex of {} blocks>", self.index.len())
    }
}

/// Token ids as little-endian `u32`s, Python's own or copied out of a sequence.
enum Tokens<'a, 'py> {
    Bytes(&'a Bound<'py, PyBytes>),
    Listed(Python<'py>, Vec<u8>),
}

impl<'a, 'py> Tokens<'a, 'py> {
    fn of(tokens: &'a Bound<'py, PyAny>) -> PyResult<Self> {
        let Ok(bytes) = tokens.cast::<PyBytes>() else {
            let listed = tokens.extract::<Vec<u32>>()?;
            let bytes = listed.into_iter().flat_map(u32::to_le_bytes).collect();
            return Ok(Self::Listed(tokens.py(), bytes));
        };
        if bytes.as_bytes().len() % size_of::<u32>() != 0 {
            return Err(PyValueError::new_err(
                "tokens as bytes must be little-endian u32s, four bytes each",
            ));
        }
        Ok(Self::Bytes(bytes))
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::Bytes(bytes) => bytes.as_bytes(),
            Self::Listed(_, bytes) => bytes,
        }
    }

    fn py(&self) -> Python<'py> {
        match self {
            Self::Bytes(bytes) => bytes.py(),
            Self::Listed(py, _) => *py,
        }
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
