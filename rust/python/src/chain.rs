//! `chain_blocks`: chain hashes of token blocks for Python.

use kvroute_core::chain::{Chain, DIGEST, TOKEN};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

#[pyfunction]
#[pyo3(
    signature = (tokens, block_size, seed = b"".as_slice(), extra = None),
    text_signature = "(tokens, block_size, seed=b'', extra=None)"
)]
pub fn chain_blocks<'py>(
    tokens: &Bound<'py, PyAny>,
    block_size: usize,
    seed: &[u8],
    extra: Option<Vec<PyBackedBytes>>,
) -> PyResult<Bound<'py, PyBytes>> {
    if block_size == 0 {
        return Err(PyValueError::new_err("block_size must be at least 1"));
    }
    let listed;
    let text = if let Ok(bytes) = tokens.cast::<PyBytes>() {
        bytes.as_bytes()
    } else {
        listed = tokens
            .extract::<Vec<u32>>()?
            .into_iter()
            .flat_map(u32::to_le_bytes)
            .collect::<Vec<_>>();
        &listed
    };
    if text.len() % TOKEN != 0 {
        return Err(PyValueError::new_err(
            "tokens as bytes must be little-endian u32s, four bytes each",
        ));
    }
    // A block too long to be counted in bytes is longer than any sequence.
    let blocks = text.chunks_exact(block_size.saturating_mul(TOKEN));
    if extra
        .as_ref()
        .is_some_and(|extra| extra.len() < blocks.len())
    {
        return Err(PyValueError::new_err(
            "extra must have an entry for each full block",
        ));
    }
    let mut extra = extra.map(Vec::into_iter);
    let mut chain = Chain::new(seed);
    PyBytes::new_with(tokens.py(), blocks.len() * DIGEST, |out| {
        for (block, digest) in blocks.zip(out.chunks_exact_mut(DIGEST)) {
            let extra = extra.as_mut().and_then(Iterator::next);
            digest.copy_from_slice(&chain.push_bytes(block, extra.as_deref().unwrap_or_default()));
        }
        Ok(())
    })
}
