//! Event streams and documents, cut anywhere.

mod streams;

use kvroute_core::http1::{Body, ClientFraming, Framing};
use kvroute_core::relay::{Forward, Relay, State, Watch};
use kvroute_core::sse::{Document, Facts, Ids, Pass, Rules, Scanner, TokenIds, Verdict, inspect};
use streams::{LIMIT, scan};

fn hiding() -> Rules {
    Rules::default()
}

/// Asserts that the stream gives this however it is cut in two or three, and in single bytes.
fn shows(stream: &str, expected: &str) -> Facts {
    shows_by(&hiding(), stream, expected)
}

fn shows_by(rules: &Rules, stream: &str, expected: &str) -> Facts {
    let bytes = stream.as_bytes();
    let hiding = || rules.clone();
    let (shown, facts) = scan(hiding(), &[bytes]);
    assert_eq!(String::from_utf8_lossy(&shown), expected);
    for first in 0..=bytes.len() {
        let (shown, told) = scan(hiding(), &[&bytes[..first], &bytes[first..]]);
        assert_eq!(
            (String::from_utf8_lossy(&shown).as_ref(), &told),
            (expected, &facts),
            "cut at {first}"
        );
    }
    let singles: Vec<&[u8]> = bytes.chunks(1).collect();
    assert_eq!(
        scan(hiding(), &singles),
        (expected.as_bytes().to_vec(), facts.clone())
    );
    let (observed, _) = scan(Rules::observe(), &singles);
    assert_eq!(observed, bytes, "observing changes nothing");
    facts
}

#[test]
fn members_go_with_the_right_comma() {
    for (object, left) in [
        (r#"{"kv_transfer_params":{"a":1},"x":1}"#, r#"{"x":1}"#),
        (
            r#"{"x":1 , "kv_transfer_params" : {"a":1} }"#,
            r#"{"x":1 }"#,
        ),
        (
            r#"{"x":1,"kv_transfer_params":[1,{}],"y":2}"#,
            r#"{"x":1,"y":2}"#,
        ),
        (
            r#"{"kv_transfer_params":1,"kv_transfer_params":2,"x":1}"#,
            r#"{"x":1}"#,
        ),
        (
            r#"{"x":1,"kv_transfer_params":1,"kv_transfer_params":2}"#,
            r#"{"x":1}"#,
        ),
        (
            r#"{"kv_transfer_params":1,"x":1,"kv_transfer_params":2}"#,
            r#"{"x":1}"#,
        ),
        (r#"{"kv_transf\u0065r_params":1,"x":1}"#, r#"{"x":1}"#),
        (
            r#"{"x":1,"response":{"kv_transfer_params":1},"kv_transfer_params":1}"#,
            r#"{"x":1,"response":{}}"#,
        ),
        (
            r#"{"x":1,"kv_transfer_params":null}"#,
            r#"{"x":1,"kv_transfer_params":null}"#,
        ),
        (
            r#"{"x":"\"kv_transfer_params\":{}","y":1}"#,
            r#"{"x":"\"kv_transfer_params\":{}","y":1}"#,
        ),
        (
            r#"{"x":{"kv_transfer_params":1}}"#,
            r#"{"x":{"kv_transfer_params":1}}"#,
        ),
    ] {
        shows(&format!("data: {object}\n\n"), &format!("data: {left}\n\n"));
    }
}

#[test]
fn events_for_the_gateway_alone_go_whole() {
    let next = "data: {\"x\":1}\n\n";
    for own in [
        "data: {\"id\":\"a\",\"choices\":[],\"kv_transfer_params\":{\"a\":1}}\n\n",
        "event: x\r\nid: 1\r\ndata: {\"choices\":[],\"usage\":null,\"kv_transfer_params\":{\"a\":1}}\r\n\r\n",
        "data:{\"kv_transfer_params\":{\"a\":1}}\r\r",
        "data: {\"kv_transfer_params\":\ndata: {\"a\":1}}\n\n",
    ] {
        let facts = shows(&format!("{own}{next}"), next);
        assert_eq!(
            facts.handle.as_deref().map(<[u8]>::trim_ascii),
            Some(&br#"{"a":1}"#[..])
        );
    }
}

#[test]
fn an_event_in_several_lines_keeps_its_other_fields() {
    shows(
        "id: 1\r\ndata: {\"x\":1,\r\nevent: e\r\ndata: \"kv_transfer_params\":{\r\ndata:}}\r\n: end\r\n\r\n",
        "id: 1\r\ndata: {\"x\":1}\r\nevent: e\r\n: end\r\n\r\n",
    );
}

#[test]
fn part_of_a_handle_does_not_go_on() {
    assert!(
        shows(
            "data: {\"x\":1,\"kv_transfer_params\":{\"remote_host\":\"10.",
            ""
        )
        .handle
        .is_none()
    );
    shows("data: {\"x\":1,\"kv_transfer_params\":{\"a\":1}}}\n\n", "");
    shows(
        "data: kv_transfer_params\n\ndata: {x\n\n",
        "data: kv_transfer_params\n\ndata: {x\n\n",
    );
}

#[test]
fn an_unfinished_event_is_passed_on_at_the_end() {
    assert!(shows("data: [DONE]", "data: [DONE]").done);
    assert!(shows(": note\n\ndata: [DONE]\n", ": note\n\ndata: [DONE]\n").done);
}

#[test]
fn what_was_cached_is_told_in_three_ways() {
    for (usage, cached) in [
        (
            r#"{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4,"audio_tokens":1}}"#,
            Some(4),
        ),
        (r#"{"input_tokens_details":{"cached_tokens":0}}"#, Some(0)),
        (r#"{"input_tokens":5,"cache_read_input_tokens":4}"#, Some(4)),
        (r#"{"prompt_tokens_details":null}"#, None),
        (r#"{"prompt_tokens_details":{"cached_tokens":null}}"#, None),
        (r#"{"prompt_tokens_details":{"cached_tokens":-1}}"#, None),
        (r#"{"prompt_tokens_details":[4]}"#, None),
    ] {
        let stream = format!("data: {{\"choices\":[],\"usage\":{usage}}}\n\ndata: [DONE]\n\n");
        assert_eq!(shows(&stream, &stream).cached_tokens, cached, "{usage}");
    }
}

#[test]
fn what_the_apis_tell() {
    let chat = shows(
        "data: {\"choices\":[{\"finish_reason\":null}],\"usage\":{\"prompt_tokens\":3}}\n\n\
         data: {\"choices\":[{\"finish_reason\":\"stop\"}],\"usage\":null}\n\n\
         data: {\"choices\":[],\"usage\":{\"completion_tokens\":5,\"prompt_tokens\":null}}\n\ndata: [DONE]\n\n",
        "data: {\"choices\":[{\"finish_reason\":null}],\"usage\":{\"prompt_tokens\":3}}\n\n\
         data: {\"choices\":[{\"finish_reason\":\"stop\"}],\"usage\":null}\n\n\
         data: {\"choices\":[],\"usage\":{\"completion_tokens\":5,\"prompt_tokens\":null}}\n\ndata: [DONE]\n\n",
    );
    assert_eq!(
        (chat.prompt_tokens, chat.completion_tokens),
        (Some(3), Some(5))
    );
    assert_eq!(
        (chat.finish_reason.as_deref(), chat.done, chat.error),
        (Some("stop"), true, false)
    );
    for error in [
        "data: {\"error\":{\"message\":\"m\"}}\n\n",
        "event: error\ndata: x\n\n",
        "data: {\"type\":\"response.failed\"}\n\n",
        "data: {\"choices\":[{\"finish_reason\":\"error\"}]}\n\n",
    ] {
        assert!(shows(error, error).error, "{error:?}");
    }
}

#[test]
fn token_ids_are_read_and_their_places_are_as_if_nobody_had_asked() {
    let stream = "data: {\"choices\":[{\"index\":0,\"delta\":{}}],\"prompt_token_ids\":[7, 4294967295],\"x\":1}\n\n\
         data: {\"choices\":[{\"index\":0,\"token_ids\":[1,2]},{\"token_ids\":[9],\"index\":1}]}\n\n\
         data: {\"choices\":[{\"token_ids\":null},3]}\n\n\
         data: {\"choices\":[{\"finish_reason\":\"stop\",\"t\\u006fken_ids\":[]}],\"usage\":null}\n\n\
         data: {\"choices\":[{\"token_ids\":[3],\"text\":\"\\\"token_ids\\\":[1]\"}],\"token_ids\":[5]}\n\n";
    let without = "data: {\"choices\":[{\"index\":0,\"delta\":{}}],\"prompt_token_ids\":null,\"x\":1}\n\n\
         data: {\"choices\":[{\"index\":0,\"token_ids\":null},{\"token_ids\":null,\"index\":1}]}\n\n\
         data: {\"choices\":[{\"token_ids\":null},3]}\n\n\
         data: {\"choices\":[{\"finish_reason\":\"stop\",\"t\\u006fken_ids\":null}],\"usage\":null}\n\n\
         data: {\"choices\":[{\"token_ids\":null,\"text\":\"\\\"token_ids\\\":[1]\"}],\"token_ids\":[5]}\n\n";
    let take = Rules::observe().with_token_ids(TokenIds::Take);
    let read = Rules::observe().with_token_ids(TokenIds::Read);
    for (rules, shown) in [(take, without), (read, stream)] {
        let facts = shows_by(&rules, stream, shown);
        assert_eq!(
            facts.prompt_token_ids.known(),
            Some(&[7, 0, 0, 0, 255, 255, 255, 255][..])
        );
        assert_eq!(
            facts.token_ids.known(),
            Some(&[1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0][..])
        );
    }
    let facts = shows_by(&Rules::observe(), stream, stream);
    assert_eq!(
        (facts.prompt_token_ids, facts.token_ids),
        (Ids::Absent, Ids::Absent)
    );
}

#[test]
fn ids_that_are_none_leave_no_part_of_a_sequence() {
    let rules = Rules::observe().with_token_ids(TokenIds::Take);
    for list in [
        "[1,-1]",
        "[4294967296]",
        "[01]",
        "[1,]",
        "[1 2]",
        "[,1]",
        "[1}",
        "[1.0]",
        "[\"1\"]",
        "[[1]]",
        "[null]",
        "{}",
        "true",
        "7",
    ] {
        let event = |list| {
            format!(
                "data: {{\"choices\":[{{\"token_ids\":{list}}}],\"prompt_token_ids\":{list}}}\n\n"
            )
        };
        let facts = shows_by(
            &rules,
            &[event("[1]"), event(list), event("[2]")].concat(),
            &event("null").repeat(3),
        );
        assert_eq!(facts.token_ids, Ids::Malformed, "{list}");
        assert_eq!(facts.prompt_token_ids, Ids::Malformed, "{list}");
    }
}

#[test]
fn a_handle_and_token_ids_leave_together() {
    let body = br#"{"choices":[{"token_ids":[1]}],"prompt_token_ids":[2],"kv_transfer_params":{"a":1},"z":0}"#;
    let rules = Rules::default().with_token_ids(TokenIds::Take);
    let (shown, facts) = Document::take_hidden(body, &rules).expect("valid JSON");
    assert_eq!(
        shown.as_deref(),
        Some(&br#"{"choices":[{"token_ids":null}],"prompt_token_ids":null,"z":0}"#[..])
    );
    assert_eq!(facts.handle.as_deref(), Some(&br#"{"a":1}"#[..]));
    assert_eq!(facts.token_ids, Ids::Known(vec![1, 0, 0, 0]));
    assert_eq!(facts.prompt_token_ids, Ids::Known(vec![2, 0, 0, 0]));
}

#[test]
fn a_response_names_itself() {
    for text in [
        "data: {\"type\":\"response.created\",\"response\":{\"id\":\"r0\",\"object\":\"response\"}}\n\n\
         data: {\"type\":\"response.completed\",\"response\":{\"object\":\"response\",\"id\":\"r1\"}}\n\n",
        "data: {\"id\":\"r1\",\"object\":\"response\",\"usage\":{}}\n\n",
    ] {
        assert_eq!(shows(text, text).response_id.as_deref(), Some("r1"));
    }
    let chat = "data: {\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"usage\":{}}\n\n";
    assert_eq!(shows(chat, chat).response_id, None);
}

#[test]
fn events_have_a_limit() {
    let event = b"data: 0123456789\n\n";
    for reads in [
        vec![&event[..]],
        event.chunks(1).collect(),
        event.chunks(7).collect(),
    ] {
        let mut out = Vec::new();
        let mut scanner = Scanner::new(hiding(), event.len());
        assert!(
            reads
                .iter()
                .all(|read| scanner.feed(read, &mut out).is_ok())
        );
        let mut scanner = Scanner::new(hiding(), event.len() - 1);
        let mut out = Vec::new();
        assert!(scanner.feed(b": first\n\n", &mut out).is_ok());
        assert!(
            reads
                .iter()
                .any(|read| scanner.feed(read, &mut out).is_err())
        );
        assert!(out.is_empty());
        // Observing goes on, without reading that event.
        let mut scanner = Scanner::new(Rules::observe(), 15);
        assert!(
            reads
                .iter()
                .all(|read| scanner.feed(read, &mut out) == Ok(Pass::Same))
        );
        assert!(scanner.at_boundary());
        assert_eq!(scanner.feed(b"data: [DONE]\n\n", &mut out), Ok(Pass::Same));
        assert!(scanner.facts().done);
    }
}

#[test]
fn deep_nesting_costs_nothing() {
    let deep = format!(
        "{{\"x\":{}1{},\"usage\":{{\"prompt_tokens\":1}}}}",
        "[".repeat(200_000),
        "]".repeat(200_000)
    );
    let mut facts = Facts::default();
    assert_eq!(
        inspect(deep.as_bytes(), &Rules::default(), &mut facts),
        Verdict::Keep
    );
    assert_eq!(facts.prompt_tokens, Some(1));
}

#[test]
fn reads_on_boundaries_go_on_as_they_came_and_others_are_framed_anew() {
    let watch = Watch::Events(Scanner::new(hiding(), LIMIT));
    let mut relay = Relay::new(Body::new(Framing::Chunked), watch, ClientFraming::Chunked);
    assert_eq!(relay.feed(b"9\r\ndata: 1\n\n\r\n"), Forward::Same);
    assert_eq!(
        relay.feed(b"9\r\ndata: 2\n\n"),
        Forward::Bytes(b"9\r\ndata: 2\n\n\r\n".to_vec())
    );
    assert_eq!(relay.feed(b"\r\n4\r\ndata"), Forward::Bytes(Vec::new()));
    assert_eq!(
        relay.feed(b"\r\n5\r\n: 3\n\n\r\n"),
        Forward::Bytes(b"9\r\ndata: 3\n\n\r\n".to_vec())
    );
    assert_eq!(relay.feed(b"9\r\ndata: 4\n\n\r\n0\r\n\r\n"), Forward::Same);
    assert_eq!(
        (relay.state(), relay.has_excess(), relay.payload_bytes()),
        (State::Complete, false, 36)
    );
}

#[test]
fn a_document_is_read_however_it_comes() {
    let body = br#"{"usage":{"prompt_tokens":3,"completion_tokens":4}}"#;
    for cut in 0..=body.len() {
        let mut document = Document::new(Rules::observe(), LIMIT);
        document.feed(&body[..cut]);
        document.finish(&body[cut..]);
        assert_eq!(document.facts().completion_tokens, Some(4));
    }
    let mut document = Document::new(Rules::observe(), body.len() - 1);
    document.finish(body);
    assert_eq!(document.facts(), &Facts::default());
}
