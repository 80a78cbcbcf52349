//! KV event batches: those that an engine really sent, and all that one could send.

use kvroute_core::events::{Batch, EngineHash, Event, Group, Stored, decode, extra_of_prompt};
use proptest::prelude::*;
use serde_json::{Value, json};

/// The msgpack of a JSON value; `{"bin": hex}` is bytes.
fn packed(value: &Value) -> Vec<u8> {
    let mut out = Vec::new();
    pack(value, &mut out);
    out
}

fn pack(value: &Value, out: &mut Vec<u8>) {
    use rmp::encode;
    match value {
        Value::Null => encode::write_nil(out).expect("memory"),
        Value::Bool(value) => encode::write_bool(out, *value).expect("memory"),
        Value::Number(number) => {
            if let Some(number) = number.as_u64() {
                encode::write_uint(out, number).expect("memory");
            } else if let Some(number) = number.as_i64() {
                encode::write_sint(out, number).expect("memory");
            } else {
                encode::write_f64(out, number.as_f64().expect("a number")).expect("memory");
            }
        }
        Value::String(text) => encode::write_str(out, text).expect("memory"),
        Value::Array(items) => {
            encode::write_array_len(out, u32::try_from(items.len()).expect("few")).expect("memory");
            for item in items {
                pack(item, out);
            }
        }
        Value::Object(members) => {
            if let Some(Value::String(hex)) = members.get("bin") {
                encode::write_bin(out, &unhex(hex)).expect("memory");
                return;
            }
            encode::write_map_len(out, u32::try_from(members.len()).expect("few")).expect("memory");
            for (name, member) in members {
                encode::write_str(out, name).expect("memory");
                pack(member, out);
            }
        }
    }
}

fn unhex(hex: &str) -> Vec<u8> {
    (0..hex.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex"))
        .collect()
}

fn capture() -> Value {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/fixtures/captures/kv_events.json"
    );
    serde_json::from_slice(&std::fs::read(path).expect("the fixture")).expect("JSON")
}

fn stored<'a, 'b>(batch: &'b Batch<'a>) -> Vec<&'b Stored<'a>> {
    let stored = batch.events.iter().filter_map(|event| match event {
        Event::Stored(stored) => Some(stored),
        _ => None,
    });
    stored.collect()
}

fn numbers(hashes: &[EngineHash]) -> Vec<u64> {
    hashes.iter().map(|hash| hash.0).collect()
}

/// One store of two blocks, as 0.32 sends it.
fn store() -> Value {
    json!({
        "type": "BlockStored", "block_hashes": [11, 12], "parent_block_hash": 10, "token_ids": [1, 2, 3, 4],
        "block_size": 2, "lora_id": null, "medium": "GPU", "lora_name": null, "extra_keys": [["salt"], null],
        "group_idx": 0, "kv_cache_spec_kind": "full_attention",
    })
}

fn with(changes: Value) -> Value {
    let (mut event, Value::Object(changes)) = (store(), changes) else {
        panic!("an object");
    };
    event.as_object_mut().expect("an object").extend(changes);
    event
}

fn without(name: &str) -> Value {
    let mut event = store();
    event.as_object_mut().expect("an object").remove(name);
    event
}

fn batch(events: &[Value]) -> Vec<u8> {
    packed(&json!([1.5, events, 3]))
}

#[test]
fn what_an_engine_sent_is_read_as_its_own_decoder_reads_it() {
    let capture = capture();
    let batches = capture["batches"].as_array().expect("batches");
    assert_eq!(batches.len(), 5);
    for real in batches {
        let payload = unhex(real["payload_hex"].as_str().expect("hex"));
        let batch = decode(&payload).expect("a batch");
        assert_eq!(
            (batch.malformed, batch.unknown, batch.rank),
            (0, 0, Some(0))
        );
        let time = real["decoded"][0].as_f64().expect("a time");
        assert!((batch.time - time).abs() < 1e-6);
        let events = real["decoded"][1].as_array().expect("events");
        assert_eq!(batch.events.len(), events.len());
        for (event, expected) in batch.events.iter().zip(events) {
            let group = |whole_prefix| Group {
                number: 0,
                whole_prefix,
            };
            match event {
                Event::Stored(event) => {
                    assert_eq!(json!(numbers(&event.hashes)), expected["block_hashes"]);
                    assert_eq!(
                        json!(event.parent.map(|hash| hash.0)),
                        expected["parent_block_hash"]
                    );
                    assert_eq!(json!(event.tokens), expected["token_ids"]);
                    assert_eq!(json!(event.block_size), expected["block_size"]);
                    assert_eq!(json!(event.tier), expected["medium"]);
                    assert_eq!(event.group, group(Some(true)));
                    let salted = expected["extra_keys"][0] == json!(["tenant-a"]);
                    let extra = event.extra.as_ref().expect("extra keys");
                    assert_eq!(
                        extra[0],
                        extra_of_prompt(None, salted.then_some("tenant-a"), 0)
                    );
                    assert!(extra[1..].iter().all(Vec::is_empty));
                }
                Event::Removed(event) => {
                    assert_eq!(json!(numbers(&event.hashes)), expected["block_hashes"]);
                    assert_eq!((event.tier.as_ref(), event.group), ("GPU", group(None)));
                }
                Event::Cleared => panic!("nothing was cleared"),
            }
        }
    }
}

#[test]
fn kve_04_all_shapes_of_a_store_are_one() {
    let map = batch(&[store()]);
    let expected = decode(&map).expect("a batch");
    let shapes = [
        json!([
            "BlockStored",
            [11, 12],
            10,
            [1, 2, 3, 4],
            2,
            null,
            "GPU",
            null,
            [["salt"], null],
            0,
            "full_attention"
        ]),
        json!([
            "BlockStored", [11, 12], 10, [1, 2, 3, 4], 2, null, "GPU", null, [["salt"], null], 0, "full_attention", null,
            {"later": [1]}, null, 7
        ]),
        with(json!({"zz_later": {"a": [1, {"b": null}]}, "ownership": "x", "session_id": 7})),
    ];
    for shape in shapes {
        let payload = batch(std::slice::from_ref(&shape));
        assert_eq!(decode(&payload).expect("a batch"), expected, "{shape}");
    }
}

#[test]
fn kve_04_old_releases_say_less() {
    let payload = batch(&[
        json!(["BlockStored", [11], null, [1, 2], 2, null]),
        json!(["BlockRemoved", [11]]),
        json!(["AllBlocksCleared"]),
    ]);
    let batch = decode(&payload).expect("a batch");
    let (stored, group) = (stored(&batch)[0], Group::default());
    assert_eq!(
        (stored.tier.as_ref(), stored.group, &stored.extra),
        ("GPU", group, &None)
    );
    let Event::Removed(removed) = &batch.events[1] else {
        panic!("a removal");
    };
    assert_eq!((removed.tier.as_ref(), removed.group), ("GPU", group));
    assert_eq!(batch.events[2], Event::Cleared);
}

#[test]
fn hashes_are_numbers_of_any_sign_or_bytes() {
    let payload = batch(&[
        with(json!({"block_hashes": [u64::MAX, -2], "parent_block_hash": 0})),
        with(
            json!({"block_hashes": [{"bin": "00ff"}, {"bin": "00fe"}], "parent_block_hash": {"bin": "00ff"}}),
        ),
    ]);
    let batch = decode(&payload).expect("a batch");
    let stored = stored(&batch);
    assert_eq!(numbers(&stored[0].hashes), [u64::MAX, u64::MAX - 1]);
    assert_eq!(stored[0].parent, Some(EngineHash(0)));
    assert_eq!(stored[1].parent, Some(stored[1].hashes[0]));
    assert_ne!(stored[1].hashes[0], stored[1].hashes[1]);
}

#[test]
fn kve_04_one_bad_event_costs_only_itself() {
    let bad = [
        with(json!({"block_size": -2})),
        with(json!({"block_size": 3})),
        with(json!({"token_ids": [1, 2, 3]})),
        with(json!({"token_ids": [1, 2, 3, 1_u64 << 32]})),
        with(json!({"token_ids": "text"})),
        with(json!({"block_hashes": [11, null]})),
        with(json!({"block_hashes": [11, [12]]})),
        with(json!({"extra_keys": [null]})),
        with(json!({"extra_keys": [[{"a": 1}], null]})),
        with(json!({"extra_keys": [[[[[[[1]]]]]], null]})),
        with(json!({"medium": 7})),
        with(json!({"group_idx": "x"})),
        without("block_hashes"),
        without("type"),
        json!(7),
        json!([]),
        json!([7, [1]]),
        json!(null),
    ];
    for bad in bad {
        let payload = batch(&[store(), bad.clone(), json!({"type": "AllBlocksCleared"})]);
        let batch = decode(&payload).expect("a batch");
        assert_eq!(
            (batch.malformed, batch.unknown, batch.rank),
            (1, 0, Some(3)),
            "{bad}"
        );
        assert!(batch.problem.is_some());
        assert_eq!(batch.events.len(), 2, "{bad}");
        assert_eq!(batch.events[1], Event::Cleared);
    }
}

#[test]
fn events_of_later_types_are_passed_over() {
    let later = json!({"type": "BlockMoved", "block_hashes": "of another kind", "medium": 7});
    let payload = batch(&[later, json!(["BlockMoved", {"x": 1}]), store()]);
    let batch = decode(&payload).expect("a batch");
    assert_eq!(
        (batch.unknown, batch.malformed, batch.events.len()),
        (2, 0, 1)
    );
}

#[test]
fn placeholders_name_blocks_without_their_tokens() {
    let placeholder = with(json!({
        "block_hashes": [11], "parent_block_hash": null, "token_ids": [], "block_size": 0, "medium": "CPU",
        "extra_keys": null, "kv_cache_spec_kind": null, "locality": null,
    }));
    let payload = batch(&[placeholder]);
    let batch = decode(&payload).expect("a batch");
    let stored = stored(&batch)[0];
    assert_eq!(
        (stored.tokens.len(), stored.block_size, stored.tier.as_ref()),
        (0, 0, "CPU")
    );
    assert_eq!((stored.group.whole_prefix, &stored.extra), (None, &None));
}

#[test]
fn groups_that_hold_the_whole_prefix_are_told_from_others() {
    for (kind, whole) in [
        ("full_attention", true),
        ("mla_attention", true),
        ("sliding_window", false),
        ("mamba", false),
        ("something_later", false),
    ] {
        let payload = batch(&[with(json!({"group_idx": 2, "kv_cache_spec_kind": kind}))]);
        let group = stored(&decode(&payload).expect("a batch"))[0].group;
        assert_eq!(
            (group.number, group.whole_prefix),
            (2, Some(whole)),
            "{kind}"
        );
    }
}

#[test]
fn kve_08_extra_keys_tell_salts_adapters_and_media_apart() {
    let extra = |lora: Value, keys: Value| {
        let payload = batch(&[with(json!({"lora_name": lora, "extra_keys": [keys, null]}))]);
        let batch = decode(&payload).expect("a batch");
        stored(&batch)[0].extra.as_ref().expect("extra keys")[0].clone()
    };
    let all = [
        extra(json!(null), json!(null)),
        extra(json!(null), json!(["x"])),
        extra(json!("x"), json!(["x"])),
        extra(json!("x"), json!(["x", "x"])),
        extra(json!(null), json!(["x", "x"])),
        extra(json!(null), json!(["xx"])),
        extra(json!(null), json!([["x", 0]])),
        extra(json!(null), json!([["x", 1]])),
        extra(json!(null), json!([["x", -1]])),
        extra(json!(null), json!([["x"], 0])),
        extra(json!(null), json!([{"bin": "78"}])),
    ];
    for (index, one) in all.iter().enumerate() {
        assert!(all[..index].iter().all(|other| other != one), "{index}");
    }
    assert_eq!(all[0], extra_of_prompt(None, None, 0));
    assert_eq!(all[1], extra_of_prompt(None, Some("x"), 0));
    assert_eq!(all[2], extra_of_prompt(Some("x"), Some("y"), 1));
    assert_eq!(all[3], extra_of_prompt(Some("x"), Some("x"), 0));
}

#[test]
fn kve_05_what_is_no_batch_is_refused() {
    for payload in [
        packed(&json!({})),
        packed(&json!(7)),
        packed(&json!([1.0])),
        packed(&json!([1.0, 7, 0])),
        vec![],
        vec![0xc1],
        // Arrays that declare 2^32 - 1 elements, of batches and of events.
        vec![0xdd, 0xff, 0xff, 0xff, 0xff],
        vec![0x93, 0x01, 0xdd, 0xff, 0xff, 0xff, 0xff, 0x01],
    ] {
        assert!(decode(&payload).is_err(), "{payload:?}");
    }
}

#[test]
fn kve_05_lengths_beyond_the_payload_are_not_awaited() {
    // [1, [["BlockStored", <an array of 2^32 - 1>]], 0]
    let mut payload = vec![0x93, 0x01, 0x92, 0x92, 0xab];
    payload.extend(b"BlockStored");
    payload.extend([0xdd, 0xff, 0xff, 0xff, 0xff, 0x00]);
    let batch = decode(&payload).expect("a batch");
    assert_eq!(
        (batch.malformed, batch.events.len(), batch.rank),
        (2, 0, None)
    );
}

#[test]
fn a_batch_that_is_cut_off_gives_what_came_whole() {
    let whole = batch(&[store(), store(), store()]);
    let read: Vec<_> = (0..=whole.len())
        .filter_map(|end| decode(&whole[..end]).ok())
        .map(|batch| (batch.events.len(), batch.malformed))
        .collect();
    assert!(
        read.iter()
            .all(|(events, malformed)| events + malformed == 3)
    );
    for events in 0..=3 {
        assert!(read.iter().any(|(read, _)| *read == events), "{events}");
    }
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(payload in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = decode(&payload);
    }

    #[test]
    fn any_change_of_a_real_batch_is_read_or_refused(
        which in 0..5_usize, at in any::<prop::sample::Index>(), byte in any::<u8>(), end in any::<prop::sample::Index>(),
    ) {
        let mut payload = unhex(capture()["batches"][which]["payload_hex"].as_str().expect("hex"));
        let at = at.index(payload.len());
        payload[at] = byte;
        payload.truncate(end.index(payload.len()).max(at) + 1);
        let _ = decode(&payload);
    }
}
