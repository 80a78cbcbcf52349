//! Event streams and documents of any content, against `serde_json`.

mod streams;

use kvroute_core::sse::{Document, Rules};
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use streams::scan;

fn values() -> impl Strategy<Value = Value> {
    let text = prop::sample::select(vec![
        "",
        "é\"\\",
        "\"kv_transfer_params\":{}",
        "kv_transfer_params",
        "\n北🙂{[,:",
    ]);
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        text.prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        let key =
            prop::sample::select(vec!["a", "kv_transfer_params", "usage", "é\\\"", "choices"])
                .prop_map(str::to_owned);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((key, inner), 0..4)
                .prop_map(|members| members.into_iter().collect::<Map<String, Value>>().into()),
        ]
    })
}

proptest! {
    #[test]
    fn hiding_leaves_the_json_that_serde_would_leave(
        members in prop::collection::vec((prop::sample::select(vec!["x", "kv_transfer_params", "z", "response"]).prop_map(str::to_owned), values()), 0..5),
        pretty in any::<bool>(),
    ) {
        let object: Map<String, Value> = members.into_iter().collect();
        let text = if pretty { serde_json::to_string_pretty(&object) } else { serde_json::to_string(&object) }.expect("JSON");
        let mut expected = object.clone();
        if !object.get("kv_transfer_params").is_none_or(Value::is_null) {
            expected.remove("kv_transfer_params");
        }
        if let Some(Value::Object(response)) = expected.get_mut("response") {
            if !response.get("kv_transfer_params").is_none_or(Value::is_null) {
                response.remove("kv_transfer_params");
            }
        }
        let (shown, _) = Document::take_hidden(text.as_bytes(), &Rules::default()).expect("valid JSON");
        let shown = shown.unwrap_or_else(|| text.clone().into_bytes());
        prop_assert_eq!(serde_json::from_slice::<Value>(&shown).expect("still JSON"), Value::from(expected));
    }

    #[test]
    fn any_bytes_are_read_the_same_however_they_are_cut(
        data in prop::collection::vec(prop::sample::select(b"data: {}[]\",\\\r\n:ukv1".to_vec()), 0..80),
        cut in any::<prop::sample::Index>(),
    ) {
        let stream = [br#"data: {"kv_transfer_params":{"a":1},"b":"#.as_slice(), &data, b"}\n\n"].concat();
        let whole = scan(Rules::default(), &[&stream]);
        let (first, second) = stream.split_at(cut.index(stream.len() + 1));
        prop_assert_eq!(scan(Rules::default(), &[first, second]), whole);
        prop_assert_eq!(scan(Rules::observe(), &[first, second]).0, stream);
    }
}

#[test]
fn serde_agrees_on_the_handle() {
    let handle = json!({"remote_block_ids": [[1, 2]], "remote_host": "10.0.0.9", "t": 2856.5});
    let body =
        json!({"choices": [{"finish_reason": "stop"}], "kv_transfer_params": handle}).to_string();
    let (shown, facts) =
        Document::take_hidden(body.as_bytes(), &Rules::default()).expect("valid JSON");
    assert_eq!(
        serde_json::from_slice::<Value>(&facts.handle.expect("found")).expect("JSON"),
        handle
    );
    assert_eq!(
        shown.as_deref(),
        Some(&br#"{"choices":[{"finish_reason":"stop"}]}"#[..])
    );
}
