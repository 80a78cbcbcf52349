//! Bodies against `serde_json`: both take the same texts, and an edit of the text is an edit of the map.

use std::fmt::Write as _;

use kvroute_core::body::{Body, BodyError, Edits, ErrorKind, MAX_DEPTH, MAX_MEMBERS, is_json};
use proptest::prelude::*;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

/// JSON values as clients send them: more strings than anything else.
fn values() -> impl Strategy<Value = Value> {
    let scalar = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        // Eighths: `serde_json` itself does not read every number back as it was.
        any::<i32>().prop_map(|number| Value::from(f64::from(number) / 8.0)),
        ".{0,24}".prop_map(Value::from),
        "[a-z\"\\\\\n\u{0}🙂]{0,40}".prop_map(Value::from),
    ];
    scalar.prop_recursive(5, 40, 5, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::vec((".{0,6}", inner), 0..5)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

fn names() -> impl Strategy<Value = String> {
    prop_oneof![
        "[a-d]",
        ".{0,4}",
        prop::sample::select(vec!["n", "max_tokens", "messages", "prompt", "tools"])
            .prop_map(String::from),
    ]
}

fn objects() -> impl Strategy<Value = Map<String, Value>> {
    prop::collection::vec((names(), values()), 0..7)
        .prop_map(|members| members.into_iter().collect())
}

/// Writes `value` with the space and the escapes that `choices` picks, one number for each choice.
fn write(value: &Value, choices: &mut impl Iterator<Item = u8>, out: &mut String) {
    let mut space = |out: &mut String| {
        let choice = choices.next().unwrap_or(0);
        out.push_str(["", "", " ", "\n  ", "\t\r"][usize::from(choice % 5)]);
    };
    space(out);
    match value {
        Value::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                out.push_str(if index > 0 { "," } else { "" });
                write(item, choices, out);
            }
            out.push(']');
        }
        Value::Object(members) => {
            out.push('{');
            for (index, (name, member)) in members.iter().enumerate() {
                out.push_str(if index > 0 { "," } else { "" });
                write(&Value::from(name.as_str()), choices, out);
                out.push(':');
                write(member, choices, out);
            }
            out.push('}');
        }
        Value::String(text) if choices.next().unwrap_or(0) % 3 == 0 => {
            out.push('"');
            for unit in text.encode_utf16() {
                write!(out, "\\u{unit:04x}").unwrap();
            }
            out.push('"');
        }
        scalar => out.push_str(&scalar.to_string()),
    }
    out.push_str(["", " "][usize::from(choices.next().unwrap_or(0) % 2)]);
}

prop_compose! {
    fn texts()(object in objects(), choices in prop::collection::vec(any::<u8>(), 0..200)) -> (Map<String, Value>, String) {
        let mut text = String::new();
        write(&Value::Object(object.clone()), &mut choices.into_iter(), &mut text);
        (object, text)
    }
}

/// Whether `serde_json` takes the bytes, without building values, which would refuse numbers that an `f64` cannot hold.
fn serde_takes(text: &[u8]) -> bool {
    serde_json::from_slice::<&RawValue>(text).is_ok()
}

fn is_judged(error: &BodyError) -> bool {
    matches!(
        error.kind,
        ErrorKind::DuplicateMember(_) | ErrorKind::WrongType { .. }
    )
}

/// Both must take the text, or both must not, unless `Body` refuses it for more than its grammar.
fn agree(text: &[u8]) -> Result<(), TestCaseError> {
    let object = text.iter().find(|byte| !b" \t\r\n".contains(byte)) == Some(&b'{');
    match Body::scan(text) {
        Ok(_) => prop_assert!(serde_takes(text)),
        Err(error) if is_judged(&error) => {}
        Err(error) => {
            prop_assert!(error.offset <= text.len());
            prop_assert!(!(serde_takes(text) && object), "{error}");
        }
    }
    prop_assert_eq!(is_json(text), serde_takes(text));
    Ok(())
}

proptest! {
    // Seeds of failures are not kept: a case that matters becomes a test of its own.
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn members_read_back_as_their_values((object, text) in texts()) {
        let body = Body::scan(&text).unwrap();
        let members: Vec<String> = body.names().map(String::from).collect();
        prop_assert_eq!(members.len(), object.len());
        for (name, value) in &object {
            let raw = body.raw(name).unwrap();
            prop_assert_eq!(&serde_json::from_slice::<Value>(raw).unwrap(), value);
            prop_assert!(!raw[0].is_ascii_whitespace() && !raw[raw.len() - 1].is_ascii_whitespace());
        }
    }

    #[test]
    fn a_splice_edits_the_map(
        (mut object, text) in texts(),
        edits in prop::collection::hash_map(names(), prop::option::of(values()), 0..4),
        over in prop::collection::hash_map(names(), prop::option::of(values()), 0..3),
    ) {
        let compile = |edits: &std::collections::HashMap<String, Option<Value>>| {
            let mut compiled = Edits::default();
            for (name, value) in edits {
                match value {
                    Some(value) => compiled.set(name, value.to_string().as_bytes()).unwrap(),
                    None => compiled.drop(name).unwrap(),
                }
            }
            compiled
        };
        let (compiled, request) = (compile(&edits), compile(&over));
        let body = Body::scan(&text).unwrap();
        let edited = body.splice(&compiled, &request).map_or(text.clone().into_bytes(), |splice| splice.to_vec());
        for (name, value) in edits.into_iter().filter(|(name, _)| !over.contains_key(name)).chain(over.clone()) {
            match value {
                Some(value) => drop(object.insert(name, value)),
                None => drop(object.remove(&name)),
            }
        }
        prop_assert_eq!(serde_json::from_slice::<Value>(&edited).unwrap(), Value::Object(object));
        // Edited again in the same way it stays as it is.
        prop_assert!(Body::scan(&edited[..]).unwrap().splice(&compiled, &request).is_none());
    }

    #[test]
    fn mutated_texts_are_taken_when_serde_json_takes_them(
        (_, text) in texts(),
        mutations in prop::collection::vec((any::<prop::sample::Index>(), 0..3_usize, "[\\[\\]{}:,\"\\\\u0-9eE.+tfn \n\u{0}é-]{0,2}"), 1..4),
    ) {
        let mut bytes = text.into_bytes();
        for (at, removed, inserted) in mutations {
            let at = at.index(bytes.len() + 1);
            let end = (at + removed).min(bytes.len());
            bytes.splice(at..end, inserted.bytes());
        }
        agree(&bytes)?;
    }

    #[test]
    fn any_bytes_are_judged_as_serde_json_does(
        noise in prop_oneof![prop::collection::vec(any::<u8>(), 0..40), "[-+0-9.eE]{1,8}".prop_map(String::into_bytes)],
    ) {
        agree(&noise)?;
        agree(&[b"{\"a\":", &noise[..], b"}"].concat())?;
        agree(&[b"{\"a\":\"", &noise[..], b"\"}"].concat())?;
    }

    #[test]
    fn every_cut_of_a_body_is_refused_at_its_end((_, text) in texts()) {
        let text = text.trim_end();
        // Near both ends every cut, between them a sample: a scan for each byte of a long text takes its square.
        let cuts = (0..text.len()).filter(|cut| *cut < 64 || cut + 64 > text.len() || cut % 7 == 0);
        for end in cuts {
            let error = Body::scan(&text.as_bytes()[..end]).unwrap_err();
            prop_assert!(error.offset <= end, "{error}");
        }
    }
}

#[test]
fn depth_is_counted_over_arrays_and_objects_alike() {
    let nested = |levels: usize| {
        let open: String = (1..levels)
            .map(|level| if level % 2 == 0 { "{\"a\":" } else { "[" })
            .collect();
        let close: String = (1..levels)
            .rev()
            .map(|level| if level % 2 == 0 { '}' } else { ']' })
            .collect();
        format!("{{\"a\":{open}1{close}}}")
    };
    assert!(Body::scan(nested(MAX_DEPTH)).is_ok());
    assert_eq!(
        Body::scan(nested(MAX_DEPTH + 1)).unwrap_err().kind,
        ErrorKind::TooDeep
    );
}

#[test]
fn brackets_must_match_at_every_depth_of_the_stack() {
    // Bits of closed containers must not be read again by later ones.
    for depth in [1, 63, 64, 65, 128, 400] {
        let (open, close) = ("[".repeat(depth), "]".repeat(depth));
        let objects = "{\"k\":".repeat(depth);
        let ends = "}".repeat(depth);
        assert!(is_json(
            format!("[{open}1{close},{objects}1{ends},{open}2{close}]").as_bytes()
        ));
        assert!(!is_json(
            format!("[{open}1{close},{objects}1{close}]").as_bytes()
        ));
    }
}

#[test]
fn members_are_counted_at_the_top_only() {
    let members = |count: usize| {
        let members: Vec<_> = (0..count).map(|at| format!("\"{at}\":1")).collect();
        format!("{{{}}}", members.join(","))
    };
    assert!(Body::scan(members(MAX_MEMBERS)).is_ok());
    assert!(Body::scan(format!("{{\"a\":{}}}", members(MAX_MEMBERS + 1))).is_ok());
    assert_eq!(
        Body::scan(members(MAX_MEMBERS + 1)).unwrap_err().kind,
        ErrorKind::TooManyMembers
    );
}

#[test]
fn digests_are_of_prefixes() {
    let messages = [
        json!({"role": "user", "content": "a, [b]"}),
        json!(["x", {"y": [1, 2]}]),
        json!("text"),
        json!(1),
    ];
    let body = |count: usize| {
        let text = json!({"model": "m", "messages": messages[..count]}).to_string();
        Body::scan(text).unwrap().message_digests()
    };
    let all = body(messages.len());
    for count in 0..=messages.len() {
        assert_eq!(body(count), all[..count]);
    }
}
