//! The gate of an engine's queue: loads from outer tiers stop while too many requests wait there.
//!
//! An exponentially weighted mean of `vllm:num_requests_waiting`, weighted by the time between samples: after 2 s a sample
//! counts half. The gate closes when the mean reaches the limit and opens again at half of it, so that it does not
//! flutter. Evidence has an age: a sample older than the bound opens the gate, and the mean starts anew with the next.

#[cfg(all(test, loom))]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(all(test, loom)))]
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Time after which a sample has half its weight.
pub const HALF_LIFE: Duration = Duration::from_secs(2);

/// What the gate says about a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateState {
    /// No limit is set.
    Off,
    /// There is no sample yet.
    Unsampled,
    /// The last sample is too old to go by.
    Stale,
    /// Few enough requests wait.
    Open,
    /// Too many do: the only state in which a load is vetoed.
    Closed,
}

impl GateState {
    /// The state in a word, for metrics.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Unsampled => "unsampled",
            Self::Stale => "stale",
            Self::Open => "open",
            Self::Closed => "closed",
        }
    }
}

/// The gate of one engine. It belongs to the endpoint, so that it leaves with it.
///
/// The mean, the time and the state are one word of memory that is exchanged whole: readers never wait, and samples of
/// several threads never mix. Times are milliseconds in 32 bits, so a sample repeats its age after 49 days.
#[derive(Debug)]
pub struct QueueGate {
    limit: f32,
    max_age: u32,
    word: AtomicU64,
}

/// A word of which the mean is not a number: there is no sample.
const EMPTY: u64 = u64::MAX;

/// Time differences in the upper range are a clock that went back, or threads that overtook each other.
const BACKWARDS: u32 = u32::MAX - (1 << 22);

#[derive(Clone, Copy)]
struct Sample {
    mean: f32,
    closed: bool,
    /// Milliseconds, wrapping.
    at: u32,
}

impl Sample {
    /// Means are never negative, so their sign bit can hold the state.
    fn pack(self) -> u64 {
        let mean = self.mean.to_bits() | (u32::from(self.closed) << 31);
        (u64::from(mean) << 32) | u64::from(self.at)
    }

    #[allow(clippy::cast_possible_truncation)] // takes the halves apart
    fn unpack(word: u64) -> Option<Self> {
        if word == EMPTY {
            return None;
        }
        let mean = (word >> 32) as u32;
        Some(Self {
            mean: f32::from_bits(mean & (u32::MAX >> 1)),
            closed: mean >> 31 == 1,
            at: word as u32,
        })
    }
}

impl QueueGate {
    /// A gate that closes at a mean of `limit` waiting requests and trusts a sample for `max_age`.
    ///
    /// A limit of 0 is no gate: it never closes, but keeps the mean for those who ask.
    #[must_use]
    #[allow(clippy::cast_precision_loss)] // queues are shorter than 2^24
    pub fn new(limit: u32, max_age: Duration) -> Self {
        Self {
            limit: limit as f32,
            max_age: u32::try_from(max_age.as_millis())
                .map_or(BACKWARDS / 2, |age| age.min(BACKWARDS / 2)),
            word: AtomicU64::new(EMPTY),
        }
    }

    /// Takes a sample: requests `waiting`, read at `at` seconds of a clock that never goes back.
    ///
    /// Returns whether it counted. One that is not a number of requests, has no time, or is older than the last does not.
    #[allow(clippy::cast_possible_truncation)] // the mean is kept in 32 bits
    pub fn observe(&self, waiting: f64, at: f64) -> bool {
        let waiting = waiting as f32;
        let (true, Some(at)) = (waiting.is_finite() && waiting >= 0.0, milliseconds(at)) else {
            return false;
        };
        self.word
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| {
                self.after(Sample::unpack(word), waiting + 0.0, at)
                    .map(Sample::pack)
            })
            .is_ok()
    }

    fn after(&self, last: Option<Sample>, waiting: f32, at: u32) -> Option<Sample> {
        let (mean, was_closed) = match last {
            None => (waiting, false),
            Some(last) => {
                let elapsed = at.wrapping_sub(last.at);
                if elapsed > BACKWARDS {
                    return None;
                }
                if elapsed > self.max_age {
                    (waiting, false)
                } else {
                    let half_lives =
                        Duration::from_millis(elapsed.into()).div_duration_f32(HALF_LIFE);
                    let weight = 1.0 - (-half_lives).exp2();
                    (last.mean + weight * (waiting - last.mean), last.closed)
                }
            }
        };
        let closed = self.limit > 0.0
            && if was_closed {
                mean > self.limit / 2.0
            } else {
                mean >= self.limit
            };
        Some(Sample { mean, closed, at })
    }

    /// What the gate says at `now`, in seconds of the samples' clock.
    #[must_use]
    pub fn state(&self, now: f64) -> GateState {
        if self.limit == 0.0 {
            return GateState::Off;
        }
        let Some(last) = self.last() else {
            return GateState::Unsampled;
        };
        match Self::age_of(last, now) {
            Some(age) if age <= self.max_age => {
                if last.closed {
                    GateState::Closed
                } else {
                    GateState::Open
                }
            }
            _ => GateState::Stale,
        }
    }

    /// The mean of waiting requests as of the last sample.
    #[must_use]
    pub fn mean(&self) -> Option<f32> {
        self.last().map(|last| last.mean)
    }

    /// The age of the last sample at `now`.
    #[must_use]
    pub fn age(&self, now: f64) -> Option<Duration> {
        Self::age_of(self.last()?, now).map(|age| Duration::from_millis(age.into()))
    }

    fn last(&self) -> Option<Sample> {
        Sample::unpack(self.word.load(Ordering::Acquire))
    }

    /// `None` if `now` is no time; a sample that came after `now` was read is new.
    fn age_of(last: Sample, now: f64) -> Option<u32> {
        let age = milliseconds(now)?.wrapping_sub(last.at);
        Some(if age > BACKWARDS { 0 } else { age })
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // wraps on purpose
fn milliseconds(seconds: f64) -> Option<u32> {
    (seconds.is_finite() && seconds >= 0.0).then(|| (seconds * 1e3).round() as u64 as u32)
}

/// In every order that the memory model allows; run by `make loom`.
#[cfg(all(test, loom))]
mod interleavings {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    fn seen(gate: &QueueGate) -> (u32, f32, bool) {
        let last = gate.last().expect("a sample");
        (last.at, last.mean, last.closed)
    }

    #[test]
    fn samples_of_two_threads_count_one_after_the_other_or_the_older_one_not_at_all() {
        loom::model(|| {
            let gate = Arc::new(QueueGate::new(9, Duration::from_secs(10)));
            gate.observe(16.0, 0.0);
            let first = (0, 16.0, true);
            // The mean of both, and of the later one alone, which is on the other side of where the gate opens.
            let (older, both, alone) = ((2000, 8.0, true), (4000, 4.5, false), (4000, 4.75, true));

            let earlier = thread::spawn({
                let gate = gate.clone();
                move || gate.observe(0.0, 2.0)
            });
            let reader = thread::spawn({
                let gate = gate.clone();
                move || [seen(&gate), seen(&gate)]
            });
            assert!(gate.observe(1.0, 4.0), "no sample is newer");

            let reads = reader.join().expect("the reader ends");
            for read in reads {
                assert!([first, older, both, alone].contains(&read), "{read:?}");
            }
            assert!(reads[0].0 <= reads[1].0, "{reads:?}");
            let counted = earlier.join().expect("the writer ends");
            assert_eq!(seen(&gate), if counted { both } else { alone });
        });
    }

    #[test]
    fn one_of_two_first_samples_sets_the_mean() {
        loom::model(|| {
            let gate = Arc::new(QueueGate::new(8, Duration::from_secs(10)));
            let other = thread::spawn({
                let gate = gate.clone();
                move || gate.observe(0.0, 2.0)
            });
            assert!(gate.observe(16.0, 2.0), "neither is older");
            assert!(other.join().expect("the writer ends"));
            // The second of them comes at no time after the first, and so weighs nothing.
            assert!([(2000, 16.0, true), (2000, 0.0, false)].contains(&seen(&gate)));
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn gate(limit: u32) -> QueueGate {
        QueueGate::new(limit, Duration::from_secs(10))
    }

    fn near(mean: Option<f32>, expected: f32) {
        let mean = mean.expect("a mean");
        assert!((mean - expected).abs() < 0.005, "{mean} is not {expected}");
    }

    #[test]
    fn the_published_example() {
        let gate = gate(8);
        for (at, waiting, mean, state) in [
            (0.0, 8.0, 8.0, GateState::Closed),
            (1.0, 0.0, 5.66, GateState::Closed),
            (3.0, 0.0, 2.83, GateState::Open),
        ] {
            assert!(gate.observe(waiting, at));
            near(gate.mean(), mean);
            assert_eq!(gate.state(at), state, "at {at}");
        }
    }

    #[test]
    fn it_closes_at_the_limit_and_opens_at_half_of_it() {
        let gate = gate(8);
        for (at, waiting, state) in [
            (0.0, 7.0, GateState::Open),
            (2.0, 9.0, GateState::Closed),
            (4.0, 1.0, GateState::Closed),
            (6.0, 3.75, GateState::Closed),
            (8.0, 3.875, GateState::Open),
            (10.0, 11.0, GateState::Open),
        ] {
            gate.observe(waiting, at);
            assert_eq!(gate.state(at), state, "at {at}: {:?}", gate.mean());
        }
    }

    #[test]
    fn an_old_sample_opens_it_and_is_forgotten() {
        let gate = gate(8);
        gate.observe(80.0, 100.0);
        assert_eq!(gate.state(110.0), GateState::Closed);
        assert_eq!(gate.state(110.001), GateState::Stale);
        assert_eq!(gate.age(110.5), Some(Duration::from_millis(10_500)));
        gate.observe(5.0, 111.0);
        near(gate.mean(), 5.0);
        assert_eq!(gate.state(111.0), GateState::Open);
    }

    #[test]
    fn without_a_limit_it_never_closes() {
        let gate = gate(0);
        gate.observe(1e6, 1.0);
        assert_eq!(gate.state(1.0), GateState::Off);
        near(gate.mean(), 1e6);
    }

    #[test]
    fn what_is_no_sample_does_not_count() {
        let gate = gate(8);
        assert_eq!(gate.state(0.0), GateState::Unsampled);
        for (waiting, at) in [
            (-1.0, 1.0),
            (f64::NAN, 1.0),
            (f64::INFINITY, 1.0),
            (9.0, f64::NAN),
            (9.0, -1.0),
            (1e300, 1.0),
        ] {
            assert!(!gate.observe(waiting, at), "{waiting} at {at}");
        }
        assert_eq!((gate.state(1.0), gate.mean()), (GateState::Unsampled, None));
        gate.observe(2.0, 50.0);
        assert!(!gate.observe(90.0, 49.0));
        near(gate.mean(), 2.0);
        // Minus zero would read as closed.
        let zero = QueueGate::new(8, Duration::from_secs(1));
        zero.observe(-0.0, 1.0);
        assert_eq!(zero.state(1.0), GateState::Open);
    }

    #[test]
    fn a_clock_that_wraps_in_its_bits_goes_on() {
        let gate = gate(8);
        let wrap = f64::from(u32::MAX) / 1e3;
        gate.observe(8.0, wrap - 0.5);
        gate.observe(0.0, wrap + 0.5);
        near(gate.mean(), 5.66);
        assert_eq!(gate.state(wrap + 1.0), GateState::Closed);
    }

    #[test]
    fn a_reader_whose_time_is_a_little_older_than_the_sample_sees_it() {
        let gate = gate(8);
        gate.observe(9.0, 20.0);
        assert_eq!(gate.state(19.9), GateState::Closed);
        assert_eq!(gate.age(19.9), Some(Duration::ZERO));
        assert_eq!(gate.state(f64::NAN), GateState::Stale);
    }

    #[test]
    fn threads_never_see_a_half_written_sample() {
        // Every writer's samples keep a mean of either 16 (closed) or 0 (open) alone: each one starts anew, since it
        // comes long after the one before. A mean with the other's state would be a torn word.
        let gate = QueueGate::new(8, Duration::from_millis(1));
        let clock = AtomicU64::new(10);
        std::thread::scope(|scope| {
            for writer in 0..4_u32 {
                let (gate, clock) = (&gate, &clock);
                scope.spawn(move || {
                    for _ in 0..20_000 {
                        #[allow(clippy::cast_precision_loss)]
                        let at = clock.fetch_add(10, Ordering::Relaxed) as f64 / 1e3;
                        gate.observe(if writer % 2 == 0 { 16.0 } else { 0.0 }, at);
                    }
                });
            }
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..50_000 {
                        if let Some(sample) = gate.last() {
                            let whole = if sample.closed { 16.0 } else { 0.0 };
                            assert!(
                                (sample.mean - whole).abs() < 1e-3,
                                "{} {}",
                                sample.mean,
                                sample.closed
                            );
                        }
                    }
                });
            }
        });
        // The newest sample won, whichever thread brought it.
        let last = gate.last().expect("a sample");
        assert_eq!(u64::from(last.at), clock.load(Ordering::Relaxed) - 10);
    }
}
