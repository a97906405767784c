//! Ranks, their GPUs and the driver in virtual time.

use std::collections::VecDeque;

use super::*;

/// What passes between two looks at everything.
const TICK: Duration = Duration::from_micros(40);

/// The default of the shim's deadline.
const DEADLINE: Duration = Duration::from_secs(10);

/// Random numbers that a failure can be repeated with.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }

    fn micros(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_micros(from + self.below(to - from + 1))
    }

    fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[usize::try_from(self.below(choices.len() as u64)).unwrap()]
    }
}

/// What the program of a rank does next.
#[derive(Clone, Copy, Debug)]
enum Act {
    /// Computes or sleeps on the CPU.
    Host(Duration),
    /// Starts a kernel that takes so long.
    Compute(Duration),
    /// Starts the next collective.
    Collective,
    /// Waits until all that it started is done.
    Sync,
}

#[derive(Clone, Copy, Debug)]
enum Work {
    Compute(Duration),
    Collective(u64),
}

/// What a job does in each step.
#[derive(Clone, Debug)]
struct Job {
    ranks: usize,
    collectives: u64,
    kernels: u64,
    kernel: Duration,
    /// On the CPU, for each kernel that is started.
    start: Duration,
    syncs: bool,
    depth: usize,
    /// How long each rank sleeps after a step, and in which of so many steps.
    sleeps: Vec<(Duration, u64)>,
    /// This rank never comes, from this step on.
    missing: Option<(usize, u64)>,
}

impl Job {
    fn random(random: &mut Random) -> Self {
        let ranks = 2 + usize::try_from(random.below(7)).unwrap();
        let collectives = 1 + random.below(6);
        let mut sleeps = vec![(Duration::ZERO, 1); ranks];
        match random.below(3) {
            0 => sleeps[0] = (random.micros(1_000, 150_000), 1),
            1 => {
                for sleep in &mut sleeps {
                    *sleep = (random.micros(0, 60_000), 1 + random.below(4));
                }
            }
            _ => {}
        }
        Self {
            ranks,
            collectives,
            kernels: collectives * (30 + random.below(130)),
            kernel: random.micros(5, 200),
            start: random.micros(8, 40),
            syncs: random.below(3) > 0,
            depth: random.one_of(&[2, 16, 128, 1024]),
            sleeps,
            missing: None,
        }
    }

    /// What rank `rank` does in step `step`.
    fn step(&self, rank: usize, step: u64, random: &mut Random) -> VecDeque<Act> {
        let mut acts = VecDeque::new();
        if self
            .missing
            .is_some_and(|(missing, from)| missing == rank && step >= from)
        {
            return VecDeque::from([Act::Host(Duration::from_secs(3600))]);
        }
        for collective in 0..self.collectives {
            let kernels = self.kernels / self.collectives
                + u64::from(collective == 0) * (self.kernels % self.collectives);
            for _ in 0..kernels {
                acts.push_back(Act::Host(
                    self.start.mul_f64(0.5 + random.below(100) as f64 / 100.0),
                ));
                acts.push_back(Act::Compute(self.kernel));
            }
            acts.push_back(Act::Collective);
        }
        if self.syncs {
            acts.push_back(Act::Sync);
        }
        let (sleep, every) = self.sleeps[rank];
        if step.is_multiple_of(every) {
            acts.push_back(Act::Host(sleep));
        }
        acts
    }
}

/// A rank: its program, its GPU, and what the driver keeps of it.
#[derive(Default)]
struct Process {
    acts: VecDeque<Act>,
    step: u64,
    /// The program is on the CPU until then.
    busy_until: Duration,
    /// In a call of the driver, which ends whatever is locked meanwhile.
    inside: bool,
    queue: VecDeque<Work>,
    /// Collectives that were started by the program, and by the GPU.
    launched: u64,
    begun: u64,
    closed: bool,
}

/// The thread of the worker that is in charge of a rank.
#[derive(Clone, Copy, PartialEq)]
enum Hand {
    /// The request reaches the process then.
    Asks(Duration),
    Waits,
    /// The answer arrives then.
    Answered(Duration),
    /// The unlock reaches the process then, and the window is so long.
    Unlocks(Duration, Duration),
    Window(Duration),
    Idle,
}

struct World {
    job: Job,
    now: Duration,
    random: Random,
    ranks: Vec<Process>,
}

impl World {
    fn new(job: Job, seed: u64) -> Self {
        let ranks = (0..job.ranks).map(|_| Process::default()).collect();
        Self {
            job,
            now: Duration::ZERO,
            random: Random(seed),
            ranks,
        }
    }

    /// One rank's program continues for as long as it can in this tick.
    fn run_program(&mut self, place: usize) {
        loop {
            let rank = &mut self.ranks[place];
            if rank.busy_until > self.now {
                return;
            }
            let Some(&act) = rank.acts.front() else {
                rank.acts = self.job.step(place, rank.step, &mut self.random);
                rank.step += 1;
                continue;
            };
            let calls = !matches!(act, Act::Host(_));
            if calls && rank.closed && !rank.inside {
                return;
            }
            rank.inside = calls;
            match act {
                Act::Host(time) => rank.busy_until = self.now.max(rank.busy_until) + time,
                Act::Sync if !rank.queue.is_empty() => return,
                Act::Sync => {}
                // A start waits inside the driver for room.
                _ if rank.queue.len() >= self.job.depth => return,
                Act::Compute(time) => rank.queue.push_back(Work::Compute(time)),
                Act::Collective => {
                    rank.queue.push_back(Work::Collective(rank.launched));
                    rank.launched += 1;
                }
            }
            rank.inside = false;
            rank.acts.pop_front();
        }
    }

    fn run_gpus(&mut self) {
        for rank in &mut self.ranks {
            if let Some(Work::Collective(number)) = rank.queue.front() {
                rank.begun = rank.begun.max(number + 1);
            }
        }
        let all = self.ranks.iter().map(|rank| rank.begun).min().unwrap();
        for rank in &mut self.ranks {
            let mut left = TICK;
            loop {
                match rank.queue.front_mut() {
                    Some(Work::Compute(time)) if *time > left => {
                        *time -= left;
                        break;
                    }
                    Some(Work::Compute(time)) => left -= *time,
                    Some(Work::Collective(number)) if *number < all => {}
                    _ => break,
                }
                rank.queue.pop_front();
            }
        }
    }

    fn tick(&mut self) {
        self.now += TICK;
        for place in 0..self.ranks.len() {
            self.run_program(place);
        }
        self.run_gpus();
    }

    fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.tick();
        }
    }

    /// Locks all as the worker does. Returns what it took, or nothing when the time was over.
    fn lock(&mut self, limit: Duration) -> (Option<Duration>, u64) {
        let began = self.now;
        let mut turns = Turns::new(self.job.ranks, self.random.below(u64::MAX));
        let mut hands: Vec<Hand> = (0..self.job.ranks)
            .map(|_| Hand::Asks(began + self.random.micros(50, 600)))
            .collect();
        let mut rounds = 0;
        while !turns.is_over() {
            self.tick();
            if self.now > began + limit {
                return (None, rounds);
            }
            let since = |time: Duration| time.saturating_sub(began);
            for place in 0..hands.len() {
                let rank = &mut self.ranks[place];
                let latency = self.random.micros(20, 400);
                match hands[place] {
                    Hand::Asks(at) if at <= self.now => {
                        assert!(!rank.closed, "locked twice");
                        rank.closed = true;
                        hands[place] = Hand::Waits;
                    }
                    Hand::Waits if rank.queue.is_empty() && !rank.inside => {
                        hands[place] = Hand::Answered(self.now + latency)
                    }
                    Hand::Answered(at) if at <= self.now => {
                        hands[place] = Hand::Idle;
                        for other in turns.note_return(place, true, since(self.now)) {
                            if matches!(hands[other], Hand::Window(_)) {
                                hands[other] = Hand::Asks(self.now + latency);
                            }
                            if let Hand::Unlocks(at, _) = hands[other] {
                                hands[other] = Hand::Unlocks(at, Duration::ZERO);
                            }
                        }
                    }
                    Hand::Unlocks(at, window) if at <= self.now => {
                        assert!(rank.closed, "unlocked twice");
                        rank.closed = false;
                        hands[place] = Hand::Window(self.now + latency + window);
                    }
                    Hand::Window(end) if end <= self.now => hands[place] = Hand::Asks(self.now + latency),
                    _ => {}
                }
            }
            if turns.due().is_some_and(|due| began + due <= self.now) {
                rounds += 1;
                for (place, window) in turns.release(since(self.now)) {
                    assert!(hands[place] == Hand::Idle);
                    hands[place] = Hand::Unlocks(self.now + self.random.micros(20, 400), window);
                }
            }
        }
        for rank in &self.ranks {
            assert!(rank.closed && rank.queue.is_empty(), "not at rest");
        }
        (Some(self.now - began), rounds)
    }

    fn unlock_all(&mut self) {
        for rank in &mut self.ranks {
            rank.closed = false;
        }
    }
}

/// Locks as the shim does: with all but a quarter of the deadline first, then with the rest of it. Returns
/// how long all of it took and in how many rounds, or nothing.
fn locked(world: &mut World) -> Option<(Duration, u64)> {
    let began = world.now;
    let mut rounds = 0;
    for limit in [DEADLINE * 3 / 4, DEADLINE / 4] {
        let (took, more) = world.lock(limit);
        rounds += more;
        if took.is_some() {
            return Some((world.now - began, rounds));
        }
        world.unlock_all();
        world.run_for(Duration::from_millis(200));
    }
    None
}

/// Every job continues, whatever became of the lock.
fn goes_on(world: &mut World) {
    world.unlock_all();
    let before: Vec<u64> = world.ranks.iter().map(|rank| rank.begun).collect();
    world.run_for(Duration::from_secs(1));
    for (rank, before) in world.ranks.iter().zip(before) {
        assert!(rank.begun > before, "a rank stands still");
    }
}

/// As many orders as there is time for; `FIRN_ORDERS` asks for more.
fn orders() -> u64 {
    std::env::var("FIRN_ORDERS").map_or(300, |orders| orders.parse().unwrap())
}

#[test]
fn every_order_of_ranks_is_locked_within_the_deadline() {
    let mut times = Vec::new();
    for seed in 0..orders() {
        let mut random = Random(seed);
        let job = Job::random(&mut random);
        let mut world = World::new(job, seed);
        world.run_for(random.micros(1_000, 300_000));
        let Some((took, _)) = locked(&mut world) else {
            panic!("order {seed} is never locked: {:?}", world.job);
        };
        times.push(took);
        if seed.is_multiple_of(10) {
            goes_on(&mut world);
        }
    }
    times.sort();
    let at = |percent: usize| times[times.len() * percent / 100];
    assert!(
        at(50) < Duration::from_millis(100) && at(99) < Duration::from_secs(2),
        "{:?} {:?}",
        at(50),
        at(99)
    );
}

/// Two to eight ranks, the first of which sleeps 150 ms after each step: the job that tries of 1 s never meet
/// at rest.
#[test]
fn a_straggler_is_waited_for() {
    for seed in 0..3 {
        for ranks in 2..=8 {
            let mut random = Random(seed);
            let mut job = Job::random(&mut random);
            job.ranks = ranks;
            job.sleeps = vec![(Duration::ZERO, 1); ranks];
            job.sleeps[0].0 = Duration::from_millis(150);
            let mut world = World::new(job, seed);
            world.run_for(random.micros(1_000, 500_000));
            assert!(locked(&mut world).is_some(), "{ranks} ranks, order {seed}");
            goes_on(&mut world);
        }
    }
}

#[test]
fn ranks_that_wait_for_one_that_never_comes_are_given_up_and_wait_on() {
    for seed in 0..2 {
        let mut random = Random(seed);
        let mut job = Job::random(&mut random);
        job.missing = Some((job.ranks - 1, 2));
        let mut world = World::new(job, seed);
        world.run_for(Duration::from_secs(2));
        assert!(locked(&mut world).is_none());
        let reached: Vec<u64> = world.ranks.iter().map(|rank| rank.begun).collect();
        world.unlock_all();
        world.ranks.last_mut().unwrap().busy_until = world.now;
        world.job.missing = None;
        goes_on(&mut world);
        assert!(
            world
                .ranks
                .iter()
                .zip(reached)
                .all(|(rank, before)| rank.begun > before)
        );
    }
}

#[test]
fn only_those_behind_run_and_a_refusal_ends_the_turns() {
    let mut turns = Turns::new(3, 1);
    assert_eq!(turns.due(), None);
    let at = Duration::from_millis;
    assert!(turns.note_return(0, true, at(1)).is_empty());
    assert_eq!(turns.due(), Some(at(1) + REST));
    let windows = turns.release(at(10));
    assert!(
        matches!(windows[..], [(0, window)] if window >= FIRST / 2 && window <= FIRST * 2),
        "{windows:?}"
    );
    assert_eq!(turns.due(), None);
    // The lock of one that is ahead returns: the one that runs has reached it.
    assert_eq!(turns.note_return(1, true, at(11)), [0]);
    assert!(turns.note_return(0, true, at(12)).is_empty());
    let both: Vec<usize> = turns
        .release(at(20))
        .into_iter()
        .map(|(place, _)| place)
        .collect();
    assert_eq!(both, [0, 1]);
    assert_eq!(turns.note_return(1, false, at(21)), [0]);
    assert!(turns.note_return(0, true, at(22)).is_empty());
    assert_eq!((turns.due(), turns.give_up()), (None, vec![0]));
    assert!(!turns.is_over());
    assert!(turns.note_return(2, true, at(23)).is_empty());
    assert_eq!(turns.give_up(), [2]);
    assert!(turns.is_over());
}
