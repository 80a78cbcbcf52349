//! Tiers of KV memory, and what of a prompt could be loaded from outside of the GPU.
//!
//! A tier has a name: its medium in capitals as KV events give it, and behind a slash where it lies, if the engine said
//! so: `GPU`, `CPU`, `STORAGE`, `STORAGE/REMOTE`. Names of later releases are kept as they come.

use std::borrow::Cow;

/// The engine's own KV memory.
pub const GPU: &str = "GPU";

/// The offloading connector's first tier; everything that comes from a tier behind it passes through.
pub const CPU: &str = "CPU";

/// Local or remote storage.
pub const STORAGE: &str = "STORAGE";

/// Blocks that a request was just routed to and no event confirmed: good for spreading load, never for a decision.
pub const SPECULATIVE: &str = "SPECULATIVE";

const LOCAL: &str = "LOCAL";
const REMOTE: &str = "REMOTE";

/// The name of a tier, from the medium and the locality of an event.
///
/// No medium is the GPU, as in old releases. Locality tells nothing about the GPU, nor about a CPU tier unless it is
/// another host's.
#[must_use]
pub fn name<'a>(medium: Option<&'a str>, locality: Option<&str>) -> Cow<'a, str> {
    let medium = capitals(medium.unwrap_or(GPU));
    let locality = locality.map(capitals);
    match (medium.as_ref(), locality.as_deref()) {
        (_, None) | (GPU, _) | (CPU, Some(LOCAL)) => medium,
        (medium, Some(locality)) => Cow::Owned(format!("{medium}/{locality}")),
    }
}

fn capitals(text: &str) -> Cow<'_, str> {
    if text.bytes().any(|byte| byte.is_ascii_lowercase()) {
        Cow::Owned(text.to_ascii_uppercase())
    } else {
        Cow::Borrowed(text)
    }
}

/// What a request's `kv_load_tiers` permits, read as vLLM reads it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum TierFilter {
    /// Every tier: the member is absent, no list, or has no valid entry.
    #[default]
    All,
    /// The CPU tier, and those that one of the entries matches.
    Only(Vec<Matcher>),
}

/// One entry of `kv_load_tiers`; what it leaves open matches everything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Matcher {
    medium: Option<&'static str>,
    locality: Option<&'static str>,
}

impl Matcher {
    /// An entry from its members; `None` if vLLM would skip it for a word that it does not know.
    #[must_use]
    pub fn new(medium: Option<&str>, locality: Option<&str>) -> Option<Self> {
        let known = |value: Option<&str>, words: [&'static str; 2]| match value {
            None => Some(None),
            Some(value) => words
                .into_iter()
                .find(|word| word.eq_ignore_ascii_case(value))
                .map(Some),
        };
        Some(Self {
            medium: known(medium, [CPU, STORAGE])?,
            locality: known(locality, [LOCAL, REMOTE])?,
        })
    }

    fn matches(&self, medium: &str, locality: Option<&str>) -> bool {
        self.medium
            .is_none_or(|wanted| wanted.eq_ignore_ascii_case(medium))
            && self.locality.is_none_or(|wanted| {
                locality.is_none_or(|locality| wanted.eq_ignore_ascii_case(locality))
            })
    }
}

impl TierFilter {
    /// The filter of a list with these entries, `None` for one that is not valid.
    ///
    /// An empty list permits no tier behind the CPU; a list without a valid entry permits all, as if it were absent.
    #[must_use]
    pub fn of_list(entries: Vec<Option<Matcher>>) -> Self {
        let was_empty = entries.is_empty();
        let valid: Vec<_> = entries.into_iter().flatten().collect();
        if valid.is_empty() && !was_empty {
            Self::All
        } else {
            Self::Only(valid)
        }
    }

    /// Whether a load may take from this tier. The GPU is not loaded from, and speculation is nothing to load.
    #[must_use]
    pub fn permits(&self, tier: &str) -> bool {
        let is = |name: &str| tier.eq_ignore_ascii_case(name);
        if is(GPU) || is(SPECULATIVE) {
            return false;
        }
        match self {
            Self::All => true,
            Self::Only(_) if is(CPU) => true,
            Self::Only(matchers) => {
                let (medium, locality) = tier
                    .split_once('/')
                    .map_or((tier, None), |(medium, locality)| (medium, Some(locality)));
                matchers.iter().any(|one| one.matches(medium, locality))
            }
        }
    }
}

/// How far one prompt's prefix reaches in each tier of the engine that would load it.
#[derive(Debug, Clone)]
pub struct PromptTiers {
    /// Tokens by tier; a tier that is absent holds none of the prompt.
    pub tokens: Vec<(String, i64)>,
    /// The prompt's length, where it is known.
    pub length: Option<u64>,
}

impl PromptTiers {
    /// Tokens that the best permitted tier holds beyond the GPU.
    ///
    /// `None` is no evidence: a count is negative or longer than the prompt. Where one count is wrong the others are not
    /// to be trusted either; a negative GPU count would even inflate the difference.
    #[must_use]
    pub fn external_tokens(&self, filter: &TierFilter) -> Option<u64> {
        let (mut gpu, mut external) = (0, 0);
        for (tier, count) in &self.tokens {
            let count = u64::try_from(*count).ok()?;
            if tier.eq_ignore_ascii_case(SPECULATIVE) {
                continue;
            }
            if self.length.is_some_and(|length| count > length) {
                return None;
            }
            if tier.eq_ignore_ascii_case(GPU) {
                gpu = gpu.max(count);
            } else if filter.permits(tier) {
                external = external.max(count);
            }
        }
        Some(external.saturating_sub(gpu))
    }
}

/// What a request could load, over all its prompts: of each the best tier of its own, then summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loadable {
    /// Tokens that are there.
    pub external: u64,
    /// Those that the request's cap lets through. Every prompt is a request of its own in the engine, with a copy of the
    /// parameters, so the cap is each prompt's.
    pub within_cap: u64,
}

impl Loadable {
    /// `None` without a prompt, or if one of them has no evidence.
    #[must_use]
    pub fn of(prompts: &[PromptTiers], filter: &TierFilter, cap: Option<u64>) -> Option<Self> {
        if prompts.is_empty() {
            return None;
        }
        let nothing = Self {
            external: 0,
            within_cap: 0,
        };
        prompts.iter().try_fold(nothing, |sum, prompt| {
            let tokens = prompt.external_tokens(filter)?;
            Some(Self {
                external: sum.external.saturating_add(tokens),
                within_cap: sum
                    .within_cap
                    .saturating_add(cap.map_or(tokens, |cap| tokens.min(cap))),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn only(entries: &[(Option<&str>, Option<&str>)]) -> TierFilter {
        let entries = entries
            .iter()
            .map(|&(medium, place)| Matcher::new(medium, place));
        TierFilter::of_list(entries.collect())
    }

    fn prompt(tokens: &[(&str, i64)], length: Option<u64>) -> PromptTiers {
        let tokens = tokens.iter().map(|&(tier, count)| (tier.to_owned(), count));
        PromptTiers {
            tokens: tokens.collect(),
            length,
        }
    }

    fn external(tokens: &[(&str, i64)], filter: &TierFilter) -> Option<u64> {
        prompt(tokens, None).external_tokens(filter)
    }

    #[test]
    fn names_come_from_events() {
        for (medium, locality, expected) in [
            (None, None, "GPU"),
            (Some("GPU"), Some("LOCAL"), "GPU"),
            (Some("cpu"), Some("LOCAL"), "CPU"),
            (Some("CPU"), Some("remote"), "CPU/REMOTE"),
            (Some("STORAGE"), None, "STORAGE"),
            (Some("STORAGE"), Some("LOCAL"), "STORAGE/LOCAL"),
            (Some("Pool2"), None, "POOL2"),
        ] {
            assert_eq!(name(medium, locality), expected);
        }
    }

    #[test]
    fn the_longest_tier_counts_minus_the_gpu() {
        let all = TierFilter::All;
        assert_eq!(
            external(&[("GPU", 256), ("CPU", 768), ("STORAGE", 1536)], &all),
            Some(1280)
        );
        assert_eq!(external(&[("gpu", 1280), ("cpu", 640)], &all), Some(0));
        assert_eq!(external(&[("Pool2", 64)], &all), Some(64));
        assert_eq!(external(&[], &all), Some(0));
    }

    #[test]
    fn a_wrong_count_spoils_the_prompt() {
        let all = TierFilter::All;
        assert_eq!(external(&[("GPU", -64), ("CPU", 640)], &all), None);
        assert_eq!(
            external(&[("GPU", 64), ("STORAGE", -1), ("CPU", 640)], &all),
            None
        );
        let length = |length| prompt(&[("CPU", 640)], length).external_tokens(&all);
        assert_eq!((length(Some(639)), length(Some(640))), (None, Some(640)));
    }

    #[test]
    fn speculation_is_no_evidence() {
        assert_eq!(
            external(&[("speculative", 1280)], &TierFilter::All),
            Some(0)
        );
        assert_eq!(
            external(
                &[("SPECULATIVE", 1280), ("CPU", 64)],
                &only(&[(None, None)])
            ),
            Some(64)
        );
    }

    #[test]
    fn only_permitted_tiers_count_and_the_cpu_always() {
        let tiers = &[
            ("CPU", 128),
            ("STORAGE/REMOTE", 640),
            ("STORAGE/LOCAL", 384),
            ("POOL", 960),
        ];
        for (filter, expected) in [
            (only(&[]), 128),
            (only(&[(Some("cpu"), Some("local"))]), 128),
            (only(&[(Some("storage"), None)]), 640),
            (only(&[(Some("Storage"), Some("local"))]), 384),
            (only(&[(None, Some("remote"))]), 960),
            (only(&[(Some("tape"), None)]), 960),
            (
                only(&[
                    (Some("tape"), None),
                    (Some("storage"), Some("moon")),
                    (Some("cpu"), None),
                ]),
                128,
            ),
        ] {
            assert_eq!(external(tiers, &filter), Some(expected), "{filter:?}");
        }
        // A tier that does not say where it lies may be either.
        assert_eq!(
            external(
                &[("STORAGE", 64)],
                &only(&[(Some("storage"), Some("remote"))])
            ),
            Some(64)
        );
    }

    #[test]
    fn prompts_are_summed_each_with_its_best_tier() {
        let first = prompt(&[("GPU", 640), ("CPU", 1280)], None);
        let prompts = [first.clone(), prompt(&[("STORAGE", 1280)], None)];
        let external = |prompts: &[_], filter| {
            Loadable::of(prompts, &filter, None).map(|found| found.external)
        };
        assert_eq!(external(&prompts, TierFilter::All), Some(1920));
        assert_eq!(external(&prompts, only(&[])), Some(640));
        assert_eq!(external(&[], TierFilter::All), None);
        let broken = prompt(&[("CPU", -1)], None);
        assert_eq!(external(&[first, broken], TierFilter::All), None);
    }

    #[test]
    fn a_cap_is_each_prompts_own() {
        let prompts = [
            prompt(&[("GPU", 640), ("CPU", 1280)], None),
            prompt(&[("STORAGE", 1280)], None),
        ];
        for (cap, within_cap) in [
            (None, 1920),
            (Some(0), 0),
            (Some(700), 1340),
            (Some(u64::MAX), 1920),
        ] {
            let expected = Loadable {
                external: 1920,
                within_cap,
            };
            assert_eq!(
                Loadable::of(&prompts, &TierFilter::All, cap),
                Some(expected)
            );
        }
    }
}
