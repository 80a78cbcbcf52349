//! Responses of engines: head, framing, and what is read of them on their way to the client.

use kvroute_core::http1::{
    Body, ClientFraming, ClientHead, Framing, Head, HeadParser, is_field, write_head,
};
use kvroute_core::relay::{Forward, Relay, RelayError, State, Watch};
use kvroute_core::sse::{Document, Scanner};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

use crate::tap::{Tap, rules};

type Fields = Vec<(PyBackedBytes, PyBackedBytes)>;

/// One response of an engine. See the stub for the protocol of its calls.
#[pyclass(module = "kvroute._core")]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a fact of its own about one response"
)]
pub struct EngineResponse {
    parser: HeadParser,
    request_is_head: bool,
    head: Option<Head>,
    framing: Framing,
    /// Body bytes that came before anybody asked for them.
    early: Vec<u8>,
    body_began: bool,
    closed_early: bool,
    relay: Option<Relay>,
    client_keep_alive: bool,
}

#[pymethods]
impl EngineResponse {
    #[new]
    #[pyo3(signature = (*, request_is_head = false))]
    fn new(request_is_head: bool) -> Self {
        Self {
            parser: HeadParser::default(),
            request_is_head,
            head: None,
            framing: Framing::Empty,
            early: Vec::new(),
            body_began: false,
            closed_early: false,
            relay: None,
            client_keep_alive: false,
        }
    }

    fn feed_head(&mut self, data: &[u8]) -> PyResult<bool> {
        if self.head.is_some() {
            self.early.extend_from_slice(data);
            return Ok(true);
        }
        let parsed = self
            .parser
            .feed(data)
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        let Some((head, length)) = parsed else {
            return Ok(false);
        };
        self.framing = head
            .framing(self.request_is_head)
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        self.head = Some(head);
        self.early.extend_from_slice(&data[length..]);
        self.body_began = length < data.len();
        Ok(true)
    }

    #[getter]
    fn started(&self) -> bool {
        self.head.is_some() || self.parser.started()
    }

    #[getter]
    fn status(&self) -> PyResult<u16> {
        Ok(self.head()?.status())
    }

    #[getter]
    fn early_bytes(&self) -> usize {
        self.early.len()
    }

    #[getter]
    fn body_began(&self) -> bool {
        self.body_began
    }

    #[getter]
    fn is_event_stream(&self) -> PyResult<bool> {
        Ok(self.head()?.is_plain("text/event-stream"))
    }

    #[getter]
    fn is_json(&self) -> PyResult<bool> {
        Ok(self.head()?.is_plain("application/json"))
    }

    #[getter]
    fn is_encoded(&self) -> PyResult<bool> {
        Ok(self.head()?.is_encoded())
    }

    #[getter]
    fn headers<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<Vec<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)>> {
        Ok(self
            .head()?
            .fields()
            .map(|(name, value)| (PyBytes::new(py, name), PyBytes::new(py, value)))
            .collect())
    }

    fn header(&self, name: &str) -> PyResult<Option<String>> {
        let values: Vec<&[u8]> = self.head()?.values(name).collect();
        // Latin-1, so that every byte has a character (RFC 9110 section 5.5).
        Ok((!values.is_empty()).then(|| {
            values
                .join(&b", "[..])
                .iter()
                .map(|&byte| char::from(byte))
                .collect()
        }))
    }

    fn start_read<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        self.head()?;
        self.start(py, Vec::new(), Watch::Nothing, ClientFraming::UntilClose)
    }

    #[pyo3(signature = (*, http_1_1, keep_alive, hide, token_ids=None, set, default, event_default, max_event_bytes))]
    #[expect(
        clippy::too_many_arguments,
        clippy::needless_pass_by_value,
        reason = "keyword arguments of one call, which pyo3 hands over"
    )]
    fn start_relay<'py>(
        &mut self,
        py: Python<'py>,
        http_1_1: bool,
        keep_alive: bool,
        hide: Option<Vec<String>>,
        token_ids: Option<&str>,
        set: Fields,
        mut default: Fields,
        event_default: Fields,
        max_event_bytes: usize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let head = self.head()?;
        let rules = rules(hide.unwrap_or_default(), token_ids)?;
        let hides = !rules.only_observe();
        let watch = if head.is_plain("text/event-stream") {
            default.extend(event_default);
            Watch::Events(Scanner::new(rules, max_event_bytes))
        } else if head.is_plain("application/json") {
            Watch::Document(Document::new(rules, max_event_bytes))
        } else {
            Watch::Nothing
        };
        let framing = match self.framing {
            // 204 has no length; that of an answer to HEAD, or of 304, is what GET would have got.
            Framing::Empty if head.status() == 204 => ClientFraming::Empty(None),
            Framing::Empty => ClientFraming::Empty(head.content_length().unwrap_or_default()),
            Framing::Length(length) if !(hides && matches!(watch, Watch::Events(_))) => {
                ClientFraming::Length(length)
            }
            _ if http_1_1 => ClientFraming::Chunked,
            _ => ClientFraming::UntilClose,
        };
        let keep_alive = keep_alive && framing != ClientFraming::UntilClose;
        let bytes = self.write_head(framing, http_1_1, keep_alive, &set, &default)?;
        self.client_keep_alive = keep_alive;
        self.start(py, bytes, watch, framing)
    }

    #[expect(
        clippy::needless_pass_by_value,
        reason = "pyo3 hands over what it extracted"
    )]
    #[pyo3(signature = (length, *, http_1_1, keep_alive, set, default))]
    fn head_for<'py>(
        &self,
        py: Python<'py>,
        length: u64,
        http_1_1: bool,
        keep_alive: bool,
        set: Fields,
        default: Fields,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = self.write_head(
            ClientFraming::Length(length),
            http_1_1,
            keep_alive,
            &set,
            &default,
        )?;
        Ok(PyBytes::new(py, &bytes))
    }

    fn feed<'py>(&mut self, py: Python<'py>, data: Bound<'py, PyBytes>) -> Bound<'py, PyBytes> {
        self.body_began |= !data.as_bytes().is_empty();
        let Some(relay) = &mut self.relay else {
            self.early.extend_from_slice(data.as_bytes());
            return PyBytes::new(py, b"");
        };
        match relay.feed(data.as_bytes()) {
            Forward::Same => data,
            Forward::Bytes(bytes) => PyBytes::new(py, &bytes),
        }
    }

    fn close<'py>(&mut self, py: Python<'py>) -> Bound<'py, PyBytes> {
        if let Some(relay) = &mut self.relay {
            return PyBytes::new(py, &relay.close());
        }
        self.closed_early = true;
        PyBytes::new(py, b"")
    }

    #[getter]
    fn state(&self) -> u8 {
        match self.relay.as_ref().map_or(State::Open, Relay::state) {
            State::Open => 0,
            State::Complete => 1,
            State::Cut => 2,
            State::Failed(RelayError::Protocol(_)) => 3,
            State::Failed(RelayError::EventTooLarge(_)) => 4,
        }
    }

    #[getter]
    fn error(&self) -> Option<String> {
        match self.relay.as_ref()?.state() {
            State::Failed(error) => Some(error.to_string()),
            _ => None,
        }
    }

    #[getter]
    fn reusable(&self) -> bool {
        let complete = self
            .relay
            .as_ref()
            .is_some_and(|relay| relay.state() == State::Complete && !relay.has_excess());
        complete
            && !self.closed_early
            && self.framing != Framing::UntilClose
            && self.head.as_ref().is_some_and(Head::keep_alive)
    }

    #[getter]
    fn client_keep_alive(&self) -> bool {
        self.client_keep_alive
    }

    #[getter]
    fn payload_bytes(&self) -> u64 {
        self.relay.as_ref().map_or(0, Relay::payload_bytes)
    }

    #[getter]
    fn at_event_boundary(&self) -> bool {
        self.relay.as_ref().is_some_and(Relay::at_event_boundary)
    }

    fn tap(&self) -> Option<Tap> {
        self.relay
            .as_ref()
            .and_then(Relay::facts)
            .cloned()
            .map(Tap::from)
    }
}

impl EngineResponse {
    fn head(&self) -> PyResult<&Head> {
        self.head
            .as_ref()
            .ok_or_else(|| PyRuntimeError::new_err("the response head is not complete"))
    }

    fn write_head(
        &self,
        framing: ClientFraming,
        http_1_1: bool,
        keep_alive: bool,
        set: &Fields,
        default: &Fields,
    ) -> PyResult<Vec<u8>> {
        if let Some((name, _)) = set
            .iter()
            .chain(default)
            .find(|(name, value)| !is_field(name, value))
        {
            let name = String::from_utf8_lossy(name);
            return Err(PyValueError::new_err(format!(
                "{name:?} is not a header field, or its value has a line end"
            )));
        }
        let (set, default) = (borrowed(set), borrowed(default));
        let client = ClientHead {
            framing,
            http_1_1,
            keep_alive,
            set: &set,
            default: &default,
        };
        Ok(write_head(self.head()?, &client))
    }

    /// Starts the body, with the bytes of it that are here already.
    fn start<'py>(
        &mut self,
        py: Python<'py>,
        mut out: Vec<u8>,
        watch: Watch,
        client: ClientFraming,
    ) -> PyResult<Bound<'py, PyBytes>> {
        if self.relay.is_some() {
            return Err(PyRuntimeError::new_err(
                "the response body was started before",
            ));
        }
        let mut relay = Relay::new(Body::new(self.framing), watch, client);
        let early = std::mem::take(&mut self.early);
        match relay.feed(&early) {
            Forward::Same => out.extend_from_slice(&early),
            Forward::Bytes(bytes) => out.extend_from_slice(&bytes),
        }
        if self.closed_early {
            out.extend_from_slice(&relay.close());
        }
        self.relay = Some(relay);
        Ok(PyBytes::new(py, &out))
    }
}

fn borrowed(fields: &Fields) -> Vec<(&[u8], &[u8])> {
    fields
        .iter()
        .map(|(name, value)| (&name[..], &value[..]))
        .collect()
}
