//! A stream through a scanner.

use kvroute_core::sse::{Facts, Pass, Rules, Scanner};

pub const LIMIT: usize = 1 << 20;

/// What is shown of a stream that comes in these reads, and what it told.
pub fn scan(rules: Rules, reads: &[&[u8]]) -> (Vec<u8>, Facts) {
    let mut scanner = Scanner::new(rules, LIMIT);
    let mut shown = Vec::new();
    for read in reads {
        let mut out = Vec::new();
        match scanner.feed(read, &mut out).expect("below the limit") {
            Pass::Same => {
                assert!(out.is_empty());
                shown.extend_from_slice(read);
            }
            Pass::Edited => shown.extend_from_slice(&out),
        }
    }
    scanner.finish(&mut shown);
    (shown, scanner.facts().clone())
}
