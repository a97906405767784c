//! A client that runs containers by name, for one runtime: nerdctl and docker, which have the same commands.

use std::io::Write as _;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use firn_documents::{Page, console};
use firn_node::wait_for;

use crate::container::gpus_used_by;
use crate::{COUNTER, Claims, CommandOutput, GpuHost, IMAGE, LOG, Lines, Outcome, STOCK};

const LIMIT: Duration = Duration::from_secs(30);

/// nerdctl or docker on a node.
#[derive(Clone, Copy)]
pub struct Client<'h> {
    /// The node.
    pub host: &'h GpuHost,
    /// Its command.
    pub program: &'static str,
    /// The runtime of its containers.
    pub runtime: &'static str,
}

/// A counter on a GPU, next to numbers on its standard output.
pub const COUNT: [&str; 3] = [
    "sh",
    "-c",
    "i=0; while :; do i=$((i + 1)); echo $i; sleep 0.05; done & \
     exec /bin/gpu-counter --out /counter.log --interval-ms 50 --mib 8",
];

/// What `inspect` shows of a container that was killed, or has ended with its checkpoint.
const KILLED: &str = "exited 137";

/// The operations of a day with it, as the page names them.
pub const DAY: &str = "`run`, `exec`, `logs`, `top`, `stats`, `pause`, `update`, `stop`, `restart`, `wait`";

const GOES_ON: &str = "the container continues ([why](#nerdctl-and-docker))";

/// The start from a checkpoint, as the page names it.
pub const START: &str = "`start --checkpoint`";

impl Client<'_> {
    /// How a command goes, if it ends within 15 s.
    pub fn output(&self, words: &[&str], stdin: &str) -> Result<CommandOutput> {
        let mut command = self.host.node().command("timeout");
        command.args(["--kill-after=1", "15", self.program]).args(words);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let written = child.stdin.take().context("stdin")?.write_all(stdin.as_bytes());
        // One that ends without its input is judged by what it shows.
        if let Err(error) = written
            && error.kind() != std::io::ErrorKind::BrokenPipe
        {
            return Err(error.into());
        }
        CommandOutput::wait(child)
    }

    /// Its exit status and what it prints to stdout.
    pub fn shows(&self, words: &[&str], stdin: &str) -> Result<String> {
        let output = self.output(words, stdin)?;
        Ok(format!("{:?} {}", output.code, output.stdout))
    }

    /// What a command that must succeed prints.
    pub fn does(&self, words: &[&str]) -> Result<String> {
        let output = self.output(words, "")?;
        ensure!(output.is_ok(), "{words:?}: {output}");
        Ok(output.stdout.trim().to_owned())
    }

    /// Runs a container without network, unless the options have one.
    pub fn run(&self, options: &[&str], command: &[&str], stdin: &str) -> Result<String> {
        self.shows(&self.run_words(options, command), stdin)
    }

    fn run_words<'w>(&self, options: &[&'w str], command: &[&'w str]) -> Vec<&'w str> {
        let network: &[&str] = if options.contains(&"--network") {
            &[]
        } else {
            &["--network", "none"]
        };
        let run = ["run", "--pull", "never", "--runtime", self.runtime];
        [&run, network, options, &[IMAGE], command].concat()
    }

    /// Runs a counter on a GPU, called `job`. Gives its id.
    pub fn counts(&self, options: &[&str]) -> Result<String> {
        let given = ["-d", "--name", "job", "--device", "nvidia.com/gpu=0"];
        let id = self.does(&self.run_words(&[&given, options].concat(), &COUNT))?;
        self.goes_on(3)?;
        Ok(id)
    }

    fn lines(&self) -> Result<Lines> {
        let lines = Lines::parse(&self.output(&["exec", "job", "cat", LOG], "")?.stdout);
        ensure!(lines.0.iter().all(|line| line.ok), "{lines:?}");
        Ok(lines)
    }

    /// The counter continues from where it is.
    pub fn goes_on(&self, more: u64) -> Result<()> {
        let from = self.lines()?.reached(1);
        wait_for("the counter to continue", LIMIT, || {
            Ok((self.lines()?.reached(1) >= from + more).then_some(()))
        })
    }

    /// The counter continues from its checkpoint, after which it may have written on, and did not begin
    /// again.
    pub fn came_back(&self) -> Result<()> {
        let from = self.lines()?.reached(1);
        wait_for("iterations since the start", LIMIT, || {
            let lines = self.lines()?;
            let back = lines.0.windows(2).find(|pair| pair[1].iter <= pair[0].iter);
            match back {
                Some(pair) => ensure!(pair[1].iter > 2, "it began again, at iteration {}", pair[1].iter),
                None if lines.reached(1) < from + 3 => return Ok(None),
                None => ensure!(lines.fault().is_none(), "{:?}", lines.fault()),
            }
            Ok(Some(()))
        })?;
        self.goes_on(3)
    }

    fn written(&self) -> Result<Vec<u64>> {
        numbers(self.does(&["logs", "job"])?.lines())
    }

    /// Waits until `logs` has more numbers of [`COUNT`], each once and in order. Gives them.
    pub fn writes_on(&self) -> Result<Vec<u64>> {
        let before = self.written()?.len();
        wait_for("more lines of its output", LIMIT, || {
            let written = self.written()?;
            let is_next = written.windows(2).all(|pair| pair[1] == pair[0] + 1);
            ensure!(is_next, "{written:?}");
            Ok((written.len() > before + 3).then_some(written))
        })
    }

    /// Waits until `logs` has numbers of a copy, which follow on what the source had written at its
    /// checkpoint: more than `behind`, and less than at its end.
    pub fn writes_again(&self, behind: u64) -> Result<()> {
        wait_for("lines of the copy's output", LIMIT, || {
            let written = self.written()?;
            let runs: Vec<&[u64]> = written.chunk_by(|one, next| *next == one + 1).collect();
            let [source, copy] = runs[..] else {
                ensure!(runs.len() < 2, "{written:?}");
                return Ok(None);
            };
            let is_in_order = copy[0] > behind && source.last() >= copy.first();
            ensure!(source[0] == 1 && is_in_order, "behind {behind}: {written:?}");
            Ok((copy.len() > 3).then_some(()))
        })
    }

    /// What `inspect` shows of the container's state.
    pub fn state(&self) -> Result<String> {
        self.does(&[
            "inspect",
            "--format",
            "{{.State.Status}} {{.State.ExitCode}}",
            "job",
        ])
    }

    /// UUIDs of the GPUs that have memory of the init of `job`.
    pub fn gpus_in_use(&self) -> Result<Vec<String>> {
        let pid = self.does(&["inspect", "--format", "{{.State.Pid}}", "job"])?;
        gpus_used_by(self.host, &[pid])
    }

    /// Checkpoints `job`, which continues.
    pub fn checkpoints(&self, name: &str) -> Result<()> {
        self.does(&["checkpoint", "create", "--leave-running", "job", name])?;
        self.goes_on(3)
    }

    /// Kills `job`.
    pub fn kills(&self) -> Result<()> {
        self.does(&["kill", "job"])?;
        self.has_ended()
    }

    /// Waits for the end of `job`, by a signal.
    pub fn has_ended(&self) -> Result<()> {
        self.output(&["wait", "job"], "")?;
        let state = self.state()?;
        ensure!(state == KILLED, "{state}");
        Ok(())
    }

    /// Checkpoints a container with a GPU, ends it, and starts it from there.
    ///
    /// nerdctl and docker ask for the end with a checkpoint only from the stock shim's name.
    pub fn checkpoint_story(&self, options: &[&str], claims: &Claims) -> Result<()> {
        let id = self.counts(options)?;
        self.checkpoints("first")?;
        claims.works("`checkpoint create --leave-running`")?;
        let written = self.writes_on()?;
        let behind = written[written.len() - 1];
        self.does(&["checkpoint", "create", "job", "last"])?;
        let created = match self.runtime {
            STOCK => Outcome::Works,
            _ => {
                self.goes_on(3)?;
                self.writes_on()?;
                self.does(&["kill", "job"])?;
                Outcome::Limited(GOES_ON)
            }
        };
        self.has_ended()?;
        claims.saw("`checkpoint create`", created)?;
        self.does(&["start", "--checkpoint", "last", "job"])?;
        self.came_back()?;
        match self.runtime {
            // A client may lose what is written while the container ends.
            STOCK => {
                let written = self.written()?;
                ensure!(written.windows(2).all(|pair| pair[1] > pair[0]), "{written:?}");
            }
            _ => self.writes_again(behind)?,
        }
        claims.works(START)?;
        self.clears(&id, &["first", "last"])
    }

    /// A service of compose, `job`, is started from its checkpoint, onto another GPU.
    pub fn compose_story(&self, example: &str, claims: &Claims) -> Result<()> {
        const FILE: &str = "/srv/compose.yaml";
        let gpus = self.host.uuids();
        let [from, to] = &gpus[..] else {
            bail!("not two GPUs: {gpus:?}")
        };
        let file = example
            .replace("image: IMAGE", &format!("image: {IMAGE}"))
            .replace("COMMAND", COUNTER)
            .replace("\"\"", &format!("{from}={to}"));
        self.host.node().write(FILE, file)?;
        self.does(&["compose", "--file", FILE, "up", "--detach", "--pull", "never"])?;
        self.goes_on(3)?;
        let used = self.gpus_in_use()?;
        ensure!(used == [&**from], "{used:?}");
        claims.works("`compose up`")?;
        self.checkpoints("first")?;
        self.kills()?;
        self.does(&["start", "--checkpoint", "first", "job"])?;
        self.came_back()?;
        let used = self.gpus_in_use()?;
        ensure!(used == [&**to], "{used:?}");
        claims.works(&format!("{START}, onto another GPU"))?;
        // nerdctl keeps it for all containers.
        self.does(&["checkpoint", "rm", "job", "first"])?;
        self.does(&["rm", "-f", "job"])?;
        self.does(&["compose", "--file", FILE, "down"]).map(drop)
    }

    /// The commands of an example's page, as they are but for image and command, which has to have begun
    /// before its checkpoint.
    pub fn example(&self, page: &str) -> Result<()> {
        for block in console::blocks(&Page::new("README.md", page)) {
            let script = block
                .script()
                .replace(" IMAGE ", &format!(" {IMAGE} "))
                .replace("COMMAND", &format!("{COUNTER}; sleep 1"));
            self.host.node().run(&["sh", "-euc", &script])?;
            self.came_back()?;
            self.does(&["rm", "-f", "job"])?;
        }
        Ok(())
    }

    /// Removes `job` and its checkpoints, of which nothing is left.
    pub fn clears(&self, id: &str, checkpoints: &[&str]) -> Result<()> {
        let listed = self.does(&["checkpoint", "ls", "job"])?;
        for name in checkpoints {
            ensure!(listed.contains(name), "{listed}");
            self.does(&["checkpoint", "rm", "job", name])?;
        }
        self.does(&["rm", "-f", "job"])?;
        crate::nothing_left(self.host, id)
    }

    /// A day with this runtime shows what it shows with the stock shim, with these exit statuses.
    pub fn has_a_day_as(&self, stock: &Self, codes: &str) -> Result<()> {
        let shown = stock.day()?;
        assert_eq!(self.day()?, shown);
        let seen: Vec<&str> = shown
            .iter()
            .filter_map(|seen| seen.split(['(', ')']).nth(1))
            .collect();
        assert_eq!(seen.concat(), codes, "{shown:?}");
        Ok(())
    }

    /// A day with it: what each command shows.
    pub fn day(&self) -> Result<Vec<String>> {
        let mut seen = Vec::new();
        // Without any input nerdctl closes it for neither shim.
        for text in ["x\n", "two\nlines\n"] {
            seen.push(self.run(&["--rm", "-i"], &["cat"], text)?);
        }
        seen.push(self.run(&["--rm"], &["sh", "-c", "echo out; echo err >&2; exit 7"], "")?);
        seen.push(self.run(&["--rm"], &["no-such-program"], "")?);
        // Two processes at any moment: `stats` counts them.
        let waits = "echo began; trap 'exit 3' TERM; sleep 1000 & wait";
        let made = self.run(&["-d", "--name", "job"], &["sh", "-c", waits], "")?;
        let Some(id) = made.strip_prefix("Some(0) ").map(str::trim) else {
            bail!("{made}")
        };
        for words in LATER {
            seen.push(self.shows(words, "to exec\n")?.replace(id, "ID"));
        }
        crate::nothing_left(self.host, id)?;
        Ok(seen)
    }
}

/// The numbers in lines.
pub fn numbers<'l>(lines: impl Iterator<Item = &'l str>) -> Result<Vec<u64>> {
    let number = |line: &str| line.parse().with_context(|| format!("{line:?} is no number"));
    lines.map(number).collect()
}

/// What follows on a day, after `job` was started.
const LATER: &[&[&str]] = &[
    &["exec", "job", "sh", "-c", "echo in; exit 5"],
    &["exec", "-i", "job", "cat"],
    &["top", "job", "-o", "args"],
    &["pause", "job"],
    &["inspect", "--format", "{{.State.Status}}", "job"],
    &["unpause", "job"],
    &["update", "--memory", "64m", "job"],
    &["stats", "--no-stream", "--format", "{{.Name}} {{.PIDs}}", "job"],
    &["stop", "job"],
    &[
        "inspect",
        "--format",
        "{{.State.Status}} {{.State.ExitCode}}",
        "job",
    ],
    &["logs", "job"],
    &["start", "job"],
    &["restart", "job"],
    &["kill", "job"],
    &["wait", "job"],
    &["rename", "job", "other"],
    &["rm", "other"],
    &["ps", "-aq"],
];
