//! `Body`, `Edits` and `BodyError`: request bodies for Python.

use kvroute_core::body;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyDict, PyMapping, PyString};
use std::sync::OnceLock;

pyo3::create_exception!(
    kvroute._core,
    BodyError,
    PyValueError,
    "A request body that the gateway cannot take: `kind`, `offset`, `member` and a sentence."
);

/// Bodies longer than this are scanned without the interpreter lock: below, giving it back and taking it costs more
/// than other threads gain.
const DETACH_BYTES: usize = 1024 * 1024;

/// A scanned request body.
#[pyclass(frozen, module = "kvroute._core")]
pub struct Body {
    data: Py<PyBytes>,
    scanned: body::Body<PyBackedBytes>,
    prefixes: OnceLock<Vec<(body::MessageDigest, usize)>>,
}

impl Body {
    fn prefixes(&self) -> &[(body::MessageDigest, usize)] {
        self.prefixes
            .get_or_init(|| self.scanned.message_prefixes())
    }
}

#[pymethods]
impl Body {
    #[staticmethod]
    #[pyo3(signature = (data, /))]
    fn scan(data: &Bound<'_, PyBytes>) -> PyResult<Self> {
        let py = data.py();
        let bytes = PyBackedBytes::from(data.clone());
        let scanned = if bytes.len() > DETACH_BYTES {
            py.detach(|| body::Body::scan(bytes))
        } else {
            body::Body::scan(bytes)
        };
        let scanned = scanned.map_err(|error| body_error(py, &error))?;
        Ok(Self {
            data: data.clone().unbind(),
            scanned,
            prefixes: OnceLock::new(),
        })
    }

    #[getter]
    fn data(&self, py: Python<'_>) -> Py<PyBytes> {
        self.data.clone_ref(py)
    }

    #[getter]
    fn model(&self) -> Option<&str> {
        self.scanned.model()
    }

    #[getter]
    fn stream(&self) -> bool {
        self.scanned.stream()
    }

    #[getter]
    fn conversation_id(&self) -> Option<&str> {
        self.scanned.conversation_id()
    }

    #[getter]
    fn kv_transfer_params<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.scanned
            .kv_transfer_params()
            .map(|raw| PyBytes::new(py, raw))
    }

    #[getter]
    fn prompt_count(&self) -> usize {
        self.scanned.prompt_count()
    }

    fn prompt_ids<'py>(&self, py: Python<'py>) -> Option<Vec<Bound<'py, PyBytes>>> {
        let prompts = self.scanned.prompt_ids()?;
        Some(prompts.iter().map(|ids| PyBytes::new(py, ids)).collect())
    }

    #[getter]
    fn message_count(&self) -> usize {
        self.scanned.message_count()
    }

    #[pyo3(signature = (name, /))]
    fn raw<'py>(&self, py: Python<'py>, name: &str) -> Option<Bound<'py, PyBytes>> {
        self.scanned.raw(name).map(|raw| PyBytes::new(py, raw))
    }

    fn names(&self) -> Vec<std::borrow::Cow<'_, str>> {
        self.scanned.names().collect()
    }

    fn message_digests<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyBytes>> {
        self.prefixes()
            .iter()
            .map(|(digest, _)| PyBytes::new(py, digest))
            .collect()
    }

    fn message_ends(&self) -> Vec<usize> {
        self.prefixes().iter().map(|(_, end)| *end).collect()
    }

    #[pyo3(signature = (edits, /, **values))]
    fn splice<'py>(
        &self,
        py: Python<'py>,
        edits: &Edits,
        values: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let over = values.map(request_edits).transpose()?.unwrap_or_default();
        match self.scanned.splice(&edits.0, &over) {
            None => Ok(self.data.bind(py).clone()),
            Some(splice) => PyBytes::new_with(py, splice.len(), |out| {
                splice.write(out);
                Ok(())
            }),
        }
    }

    fn __len__(&self) -> usize {
        self.scanned.bytes().len()
    }

    fn __repr__(&self) -> String {
        let names: Vec<_> = self.scanned.names().collect();
        format!(
            "<Body of {} bytes: {}>",
            self.scanned.bytes().len(),
            names.join(", ")
        )
    }
}

/// Edits of top-level members, compiled once and used for many bodies.
#[pyclass(frozen, module = "kvroute._core")]
pub struct Edits(body::Edits);

#[pymethods]
impl Edits {
    #[new]
    #[pyo3(signature = (*, set = None, drop = None))]
    fn new(set: Option<&Bound<'_, PyMapping>>, drop: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let mut edits = body::Edits::default();
        if let Some(set) = set {
            for item in set.items()? {
                let (name, value): (Bound<'_, PyString>, Bound<'_, PyBytes>) = item.extract()?;
                edits
                    .set(name.to_str()?, value.as_bytes())
                    .map_err(|error| edit_error(&error))?;
            }
        }
        if let Some(drop) = drop {
            if drop.is_instance_of::<PyString>() {
                return Err(PyTypeError::new_err(
                    "drop must be an iterable of names, not one string",
                ));
            }
            for name in drop.try_iter()? {
                edits
                    .drop(name?.cast::<PyString>()?.to_str()?)
                    .map_err(|error| edit_error(&error))?;
            }
        }
        Ok(Self(edits))
    }
}

fn request_edits(values: &Bound<'_, PyDict>) -> PyResult<body::Edits> {
    let mut edits = body::Edits::default();
    for (name, value) in values {
        let name = name.cast::<PyString>()?;
        match value.extract::<Option<Bound<'_, PyBytes>>>()? {
            Some(value) => edits.set(name.to_str()?, value.as_bytes()),
            None => edits.drop(name.to_str()?),
        }
        .map_err(|error| edit_error(&error))?;
    }
    Ok(edits)
}

fn edit_error(error: &body::EditError) -> PyErr {
    PyValueError::new_err(error.to_string())
}

fn body_error(py: Python<'_>, error: &body::BodyError) -> PyErr {
    let raised = BodyError::new_err(error.to_string());
    let value = raised.value(py);
    let attributes = value
        .setattr("kind", error.kind.code())
        .and_then(|()| value.setattr("offset", error.offset))
        .and_then(|()| value.setattr("member", error.kind.member()));
    attributes.err().unwrap_or(raised)
}
