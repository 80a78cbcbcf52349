//! Response heads and body framing, cut anywhere, against decoders that see everything at once.

use kvroute_core::http1::{
    Body, ClientFraming, ClientHead, Framing, Head, HeadParser, MAX_EXTRA_BYTES, MAX_HEAD_BYTES,
    ProtocolError, is_field, write_head,
};
use proptest::prelude::*;

fn parse(bytes: &[u8]) -> Result<Option<(Head, usize)>, ProtocolError> {
    HeadParser::default().feed(bytes)
}

fn head(bytes: &[u8]) -> Head {
    parse(bytes).expect("valid").expect("complete").0
}

fn framing(fields: &str) -> Result<Framing, ProtocolError> {
    head(format!("HTTP/1.1 200 OK\r\n{fields}\r\n").as_bytes()).framing(false)
}

#[test]
fn a_head_is_found_wherever_it_is_cut() {
    let interim = b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n".as_slice();
    let last = b"HTTP/1.1 200 \r\nA: 1\r\nB:\r\n\r\n".as_slice();
    let whole = [interim, interim, last, b"body"].concat();
    let length = whole.len() - 4;
    for cut in 0..=whole.len() {
        let mut parser = HeadParser::default();
        let first = parser.feed(&whole[..cut]).expect("valid");
        let (head, used) = first.unwrap_or_else(|| {
            let second = parser.feed(&whole[cut..]).expect("valid");
            second
                .map(|(head, used)| (head, cut + used))
                .expect("complete")
        });
        assert_eq!(
            (head.status(), head.reason(), used),
            (200, &b""[..], length)
        );
        let fields: Vec<_> = head.fields().collect();
        assert_eq!(fields, [(&b"A"[..], &b"1"[..]), (b"B", b"")]);
    }
    let mut parser = HeadParser::default();
    let found = whole
        .iter()
        .find_map(|&byte| parser.feed(&[byte]).expect("valid"));
    assert_eq!(
        found.map(|(head, used)| (head.status(), used)),
        Some((200, 1))
    );
}

#[test]
fn heads_have_limits() {
    let long = [
        b"HTTP/1.1 200 OK\r\nA: ".to_vec(),
        vec![b'a'; MAX_HEAD_BYTES],
    ]
    .concat();
    assert_eq!(parse(&long).unwrap_err(), ProtocolError::HeadTooLarge);
    let interim = b"HTTP/1.1 100 Continue\r\n\r\n".repeat(MAX_HEAD_BYTES / 20);
    assert_eq!(parse(&interim).unwrap_err(), ProtocolError::HeadTooLarge);
    assert_eq!(
        parse(b"HTTP/1.1 101 X\r\n\r\n").unwrap_err(),
        ProtocolError::Upgrade
    );
    assert!(matches!(
        parse(b"HTTP/2 200 OK\r\n\r\n"),
        Err(ProtocolError::Head(_))
    ));
}

#[test]
fn bodies_are_framed_as_rfc_9112_has_it() {
    assert_eq!(framing(""), Ok(Framing::UntilClose));
    assert_eq!(framing("Content-Length: 5\r\n"), Ok(Framing::Length(5)));
    assert_eq!(
        framing("Content-Length: 5, 5\r\nContent-Length: 5\r\n"),
        Ok(Framing::Length(5))
    );
    assert_eq!(
        framing("Transfer-Encoding: CHUNKED\r\n"),
        Ok(Framing::Chunked)
    );
    assert_eq!(
        framing("Transfer-Encoding: chunked\r\nContent-Length: 5\r\n"),
        Ok(Framing::Chunked)
    );
    for length in [
        "5, 6",
        "-1",
        "+1",
        "0x5",
        "",
        "1.0",
        "18446744073709551616",
        "5,",
    ] {
        assert_eq!(
            framing(&format!("Content-Length: {length}\r\n")),
            Err(ProtocolError::ContentLength),
            "{length:?}"
        );
    }
    for coding in [
        "gzip",
        "gzip, chunked",
        "chunked, chunked",
        "chunked\r\nTransfer-Encoding: x",
    ] {
        assert_eq!(
            framing(&format!("Transfer-Encoding: {coding}\r\n")),
            Err(ProtocolError::TransferEncoding),
            "{coding:?}"
        );
    }
    let chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    assert_eq!(head(chunked).framing(true), Ok(Framing::Empty));
    for status in [204, 304] {
        let bytes = format!("HTTP/1.1 {status} X\r\nContent-Length: 5\r\n\r\n");
        assert_eq!(head(bytes.as_bytes()).framing(false), Ok(Framing::Empty));
    }
}

#[test]
fn connections_are_kept_as_rfc_9112_has_it() {
    let kept = |version: &str, fields: &str| {
        head(format!("HTTP/1.{version} 200 OK\r\n{fields}\r\n").as_bytes()).keep_alive()
    };
    assert!(kept("1", ""));
    assert!(!kept("1", "Connection: x, Close\r\n"));
    assert!(!kept("0", ""));
    assert!(kept("0", "Connection: Keep-Alive\r\n"));
    assert!(!kept(
        "1",
        "Transfer-Encoding: chunked\r\nContent-Length: 1\r\n"
    ));
    assert!(!kept(
        "0",
        "Connection: keep-alive\r\nTransfer-Encoding: chunked\r\n"
    ));
}

#[test]
fn the_client_gets_a_head_of_its_own() {
    let engine = head(
        b"HTTP/1.0 200 Fine\r\nDate: a\r\nX-Named: 1\r\nConnection: x-named, close\r\nDate: b\r\n\
          TE: x\r\nContent-Length: 9\r\nSet-Cookie: 1\r\nset-cookie: 2\r\nX-Id: e\r\nN: \xe5\xe9\r\n\r\n",
    );
    let client = ClientHead {
        framing: ClientFraming::Chunked,
        http_1_1: true,
        keep_alive: false,
        set: &[(b"x-ID", b"g")],
        default: &[(b"date", b"own"), (b"Server", b"own"), (b"X-Id", b"never")],
    };
    let expected = b"HTTP/1.1 200 Fine\r\nDate: a\r\nSet-Cookie: 1\r\nset-cookie: 2\r\nN: \xe5\xe9\r\nx-ID: g\r\n\
          Server: own\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n";
    assert_eq!(write_head(&engine, &client), expected);
}

#[test]
fn a_field_cannot_leave_its_line() {
    assert!(is_field(b"X-A", b"b \xe9\t"));
    for (name, value) in [
        (&b""[..], &b""[..]),
        (b"a b", b""),
        (b"a:", b""),
        (b"a", b"\r"),
        (b"a", b"x\n"),
        (b"a", b"\0"),
    ] {
        assert!(!is_field(name, value));
    }
}

/// The payload, whether the body is complete, and how many bytes were used.
fn decode(framing: Framing, reads: &[&[u8]]) -> Result<(Vec<u8>, bool, usize), ProtocolError> {
    let mut body = Body::new(framing);
    let (mut payload, mut used) = (Vec::new(), 0);
    for read in reads {
        let mut at = 0;
        while at < read.len() && !body.is_complete() {
            let step = body.step(read, at)?;
            payload.extend_from_slice(&read[step.payload]);
            at = step.next;
        }
        used += at;
    }
    Ok((payload, body.is_complete(), used))
}

#[test]
fn chunks_that_are_not_chunks_are_refused() {
    for bytes in [
        &b"\r\n"[..],
        b"x\r\n",
        b"3\n",
        b"3\rx",
        b"3\r\nabcd",
        b"3\r\nabc\n",
        b"-1\r\n",
        b"0x1\r\n",
        b" 1\r\n",
        b"1;a\nb",
        b"0\r\nA: b\n",
        b"0\r\n\rx",
        b"1000000000000000\r\n",
    ] {
        assert_eq!(
            decode(Framing::Chunked, &[bytes]),
            Err(ProtocolError::Chunk),
            "{bytes:?}"
        );
    }
    let extension = [&b"1;"[..], &vec![b'a'; MAX_EXTRA_BYTES]].concat();
    assert_eq!(
        decode(Framing::Chunked, &[&extension]),
        Err(ProtocolError::ExtraTooLarge)
    );
    let trailers = [&b"0\r\n"[..], &b"A: b\r\n".repeat(MAX_EXTRA_BYTES)].concat();
    assert_eq!(
        decode(Framing::Chunked, &[&trailers]),
        Err(ProtocolError::ExtraTooLarge)
    );
}

proptest! {
    #[test]
    fn chunks_give_their_payload_wherever_they_are_cut(
        pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40), 0..6),
        extension in prop::sample::select(vec!["", ";a", " ;a=\"b\"", "\t"]),
        trailers in prop::sample::select(vec!["", "A: b\r\n", "A: b\r\nC:\r\n"]),
        upper in any::<bool>(),
        rest in prop::collection::vec(any::<u8>(), 0..5),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let mut whole = Vec::new();
        for piece in &pieces {
            let size = if upper { format!("{:04X}", piece.len()) } else { format!("{:x}", piece.len()) };
            whole.extend_from_slice(format!("{size}{extension}\r\n").as_bytes());
            whole.extend_from_slice(piece);
            whole.extend_from_slice(b"\r\n");
        }
        whole.extend_from_slice(format!("0{extension}\r\n{trailers}\r\n").as_bytes());
        let length = whole.len();
        whole.extend_from_slice(&rest);
        let mut ends: Vec<usize> = cuts.iter().map(|cut| cut.index(whole.len() + 1)).collect();
        ends.extend([0, whole.len()]);
        ends.sort_unstable();
        let reads: Vec<&[u8]> = ends.windows(2).map(|pair| &whole[pair[0]..pair[1]]).collect();
        prop_assert_eq!(decode(Framing::Chunked, &reads), Ok((pieces.concat(), true, length)));
        let cut = decode(Framing::Chunked, &[&whole[..length - 1]]).expect("valid");
        prop_assert!(!cut.1);
    }

    #[test]
    fn a_length_takes_what_it_says(data in prop::collection::vec(any::<u8>(), 0..50), length in 0_u64..60, cut in 0_usize..50) {
        let (first, second) = data.split_at(cut.min(data.len()));
        let taken = usize::try_from(length).expect("small").min(data.len());
        let expected = (data[..taken].to_vec(), taken as u64 == length, taken);
        prop_assert_eq!(decode(Framing::Length(length), &[first, second]), Ok(expected));
    }

    #[test]
    fn any_bytes_as_a_chunked_body_end_or_fail(data in prop::collection::vec(prop::sample::select(b"0123af;\r\n: x\0".to_vec()), 0..60)) {
        let whole = decode(Framing::Chunked, &[&data]);
        let bytes: Vec<&[u8]> = data.chunks(1).collect();
        prop_assert_eq!(decode(Framing::Chunked, &bytes), whole);
    }

    #[test]
    fn any_bytes_as_a_head_end_or_fail(data in prop::collection::vec(any::<u8>(), 0..80)) {
        let _ = parse(&[b"HTTP/1.1 ", &data[..]].concat());
        let _ = parse(&data);
    }
}
