//! Containers that hold random objects: what the audit accepts moves, and CRIU has no use for what it
//! refuses.
//!
//! `FIRN_RANDOM_CONTAINERS=1000` makes more of them, `FIRN_RANDOM_SEED` others.

use anyhow::{Context, Result, ensure};
use firn_lab::{Container, GpuHost, Random, failure, on};
use firn_node::Platform;

use super::table::{BY_RULES, Object, REFUSED, Refused, WATCHES, movable};
use super::{IMAGE, Kind, expect_untouched, host, logs};

/// Containers of a run on each platform.
const USUAL: u64 = 6;

/// The most objects of a container that move, and that are refused.
const MOST: usize = 12;
const MOST_REFUSED: usize = 2;

/// How the process of an object may be started: as a child of the first process, in a session of its own, as
/// an orphan, as a grandchild, with open files of its own.
const STARTS: [&str; 5] = [
    "PROCESS &",
    "setsid PROCESS &",
    "sh -c 'PROCESS &'",
    "sh -c 'PROCESS & wait' &",
    "PROCESS 7</etc/passwd 8>/dev/null &",
];

/// What the first process does without a GPU. It would not wait for orphans.
const IDLE: &str = "while :; do sleep 1; done";

/// A container that is drawn.
struct Drawn {
    kind: Kind,
    /// With the way in which each is started.
    objects: Vec<(Object<'static>, &'static str)>,
    refused: Vec<Refused>,
}

impl Drawn {
    fn new(random: &mut Random, platform: Platform) -> Self {
        let kind = if random.below(2) == 0 {
            Kind::Plain
        } else {
            Kind::Gpu
        };
        let mut moving = movable(platform.suite);
        if kind == Kind::Gpu {
            moving.extend(WATCHES);
        }
        let mut refusing = REFUSED.to_vec();
        // CRIU's log names the others less clearly.
        let connection = BY_RULES.iter().filter(|(_, code)| *code == "FIRN-TCP");
        refusing.extend(connection.map(|(refused, _)| *refused));
        let refused = match random.below(3) {
            0 => {
                let count = 1 + random.index(MOST_REFUSED);
                taken(random, &mut refusing, count)
            }
            _ => Vec::new(),
        };
        let count = 1 + random.index(MOST);
        let moving = taken(random, &mut moving, count);
        let all = moving.into_iter().chain(refused.iter().map(|refused| refused.0));
        let objects = all
            .map(|object| (object, STARTS[random.index(STARTS.len())]))
            .collect();
        Self {
            kind,
            objects,
            refused,
        }
    }

    /// To be made again by hand.
    fn script(&self) -> String {
        let start = |((object, ..), start): &(Object<'_>, &str)| {
            format!("{}\n", start.replace("PROCESS", &logs::process(object)))
        };
        self.objects.iter().map(start).collect()
    }

    fn objects(&self) -> Vec<Object<'static>> {
        self.objects.iter().map(|(object, _)| *object).collect()
    }

    /// The audit and what happens agree.
    fn agrees(&self, host: &GpuHost) -> Result<()> {
        let objects = self.objects();
        let container = self.kind.run(host, &objects, &self.script(), IDLE)?;
        self.kind.all_go_on(host, &container, &objects, &[])?;
        let audit = host.node().run(&["sh", "-c", "firn audit c; echo rc $?"])?.stdout;
        if self.refused.is_empty() {
            ensure!(
                !audit.contains("rc 1"),
                "it moves, and the audit refuses it: {audit}"
            );
            self.moves(host, container, &objects)
        } else {
            for (_, shown, _) in &self.refused {
                ensure!(
                    audit.contains("rc 1") && audit.contains(shown),
                    "no {shown}: {audit}"
                );
            }
            self.is_refused(host, container, &objects)
        }
    }

    fn moves(&self, host: &GpuHost, container: Container<'_>, objects: &[Object<'_>]) -> Result<()> {
        let before = self.kind.all_go_on(host, &container, objects, &[])?;
        container.checkpoint(IMAGE).context("the audit accepts it")?;
        self.kind
            .all_go_on(host, &container, objects, &before)
            .context("after the checkpoint")?;
        container.remove()?;
        let (copy, _) = Container::restore(host, "c", IMAGE, self.kind.counters())?;
        self.kind
            .all_go_on(host, &copy, objects, &before)
            .context("the copy")?;
        copy.remove()?;
        host.remove_image(IMAGE)
    }

    /// CRIU stops at the first of them.
    fn is_refused(&self, host: &GpuHost, container: Container<'_>, objects: &[Object<'_>]) -> Result<()> {
        let (before, length) = (host.runc_calls("checkpoint")?, host.log_length()?);
        let output = failure(container.checkpoint(IMAGE)).context("the audit refuses it")?;
        let calls = host.runc_calls("checkpoint")? - before;
        match self.kind {
            Kind::Gpu => {
                let shown: Vec<&str> = self.refused.iter().map(|(_, shown, _)| *shown).collect();
                expect_untouched(host, length, calls, &output, &shown)?;
            }
            Kind::Plain => {
                let is_why = self.refused.iter().any(|(.., of_criu)| output.contains(of_criu));
                ensure!(calls == 1 && is_why, "{calls} calls: {output}");
            }
        }
        self.kind
            .all_go_on(host, &container, objects, &[])
            .context("after the refusal")?;
        container.remove()
    }
}

/// So many of them, each once.
fn taken<T>(random: &mut Random, from: &mut Vec<T>, count: usize) -> Vec<T> {
    let count = count.min(from.len());
    (0..count)
        .map(|_| from.swap_remove(random.index(from.len())))
        .collect()
}

fn setting(name: &str, usual: u64) -> Result<u64> {
    match std::env::var(name) {
        Ok(text) => text.parse().with_context(|| format!("{name} is no number")),
        Err(_) => Ok(usual),
    }
}

pub(super) fn the_audit_of_random_containers_is_right(platform: Platform) -> Result<()> {
    let count = setting("FIRN_RANDOM_CONTAINERS", USUAL)?;
    let seed = setting("FIRN_RANDOM_SEED", 1)?;
    on([host(platform, "ob-x")?], |[host]| {
        host.watch_runc()?;
        let mut random = Random::new(seed);
        for nth in 1..=count {
            let drawn = Drawn::new(&mut random, platform);
            drawn.agrees(host).with_context(|| {
                format!(
                    "container {nth} of seed {seed}, {}:\n{}",
                    drawn.kind.shown(),
                    drawn.script()
                )
            })?;
        }
        host.idle()
    })
}
