//! What an engine's answer told, and what is taken out of it.

use kvroute_core::sse::{Document, Facts, Rules, TokenIds};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// What an engine's answer told. See the stub for the meaning of each attribute.
#[pyclass(module = "kvroute._core", frozen)]
pub struct Tap(Facts);

#[pymethods]
impl Tap {
    #[getter]
    fn handle<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        bytes(py, self.0.handle.as_deref())
    }

    #[getter]
    fn prompt_tokens(&self) -> Option<u64> {
        self.0.prompt_tokens
    }

    #[getter]
    fn cached_tokens(&self) -> Option<u64> {
        self.0.cached_tokens
    }

    #[getter]
    fn completion_tokens(&self) -> Option<u64> {
        self.0.completion_tokens
    }

    #[getter]
    fn finish_reason(&self) -> Option<&str> {
        self.0.finish_reason.as_deref()
    }

    #[getter]
    fn response_id(&self) -> Option<&str> {
        self.0.response_id.as_deref()
    }

    #[getter]
    fn prompt_token_ids<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        bytes(py, self.0.prompt_token_ids.known())
    }

    #[getter]
    fn token_ids<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        bytes(py, self.0.token_ids.known())
    }

    #[getter]
    fn error(&self) -> bool {
        self.0.error
    }

    #[getter]
    fn done(&self) -> bool {
        self.0.done
    }

    /// Without the handle, which has addresses in it, and with the number of the token ids.
    fn __repr__(&self) -> String {
        let Facts {
            handle,
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            finish_reason,
            response_id,
            prompt_token_ids,
            token_ids,
            error,
            done,
        } = &self.0;
        let size = |bytes: Option<&[u8]>, unit: usize, name: &str| {
            bytes.map_or("None".to_owned(), |bytes| {
                format!("<{} {name}>", bytes.len() / unit)
            })
        };
        let handle = size(handle.as_deref(), 1, "bytes");
        let prompt_ids = size(prompt_token_ids.known(), 4, "ids");
        let ids = size(token_ids.known(), 4, "ids");
        format!(
            "Tap(handle={handle}, prompt_tokens={prompt_tokens:?}, cached_tokens={cached_tokens:?}, \
             completion_tokens={completion_tokens:?}, finish_reason={finish_reason:?}, response_id={response_id:?}, prompt_token_ids={prompt_ids}, \
             token_ids={ids}, error={error}, done={done})"
        )
    }
}

impl From<Facts> for Tap {
    fn from(facts: Facts) -> Self {
        Self(facts)
    }
}

fn bytes<'py>(py: Python<'py>, value: Option<&[u8]>) -> Option<Bound<'py, PyBytes>> {
    value.map(|value| PyBytes::new(py, value))
}

/// What is hidden, and what is done about token ids: `None`, `"read"` or `"take"`.
pub(crate) fn rules(hide: Vec<String>, token_ids: Option<&str>) -> PyResult<Rules> {
    let token_ids = match token_ids {
        None => TokenIds::Ignore,
        Some("read") => TokenIds::Read,
        Some("take") => TokenIds::Take,
        Some(_) => {
            return Err(PyValueError::new_err(
                "token_ids is \"read\", \"take\" or None",
            ));
        }
    };
    Ok(Rules::hide(hide).with_token_ids(token_ids))
}

/// Takes hidden members out of an answer that is one JSON document.
#[pyfunction]
#[pyo3(signature = (body, hide, token_ids=None))]
pub fn hide_in_document<'py>(
    py: Python<'py>,
    body: Bound<'py, PyBytes>,
    hide: Vec<String>,
    token_ids: Option<&str>,
) -> PyResult<(Bound<'py, PyBytes>, Tap)> {
    let (edited, facts) = Document::take_hidden(body.as_bytes(), &rules(hide, token_ids)?)
        .map_err(|error| PyValueError::new_err(error.to_string()))?;
    let shown = edited.map_or(body, |bytes| PyBytes::new(py, &bytes));
    Ok((shown, Tap(facts)))
}
