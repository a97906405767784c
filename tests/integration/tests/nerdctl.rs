//! nerdctl, the client: what it shows with firn is what it shows with the stock shim, and containers with
//! GPUs go on by its checkpoint commands.
//!
//! Needs root, and Go to build nerdctl.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{Container, FIRN, GpuHost, IMAGE, STOCK, SimGpu, Skip, cases, matrix, on};
use firn_node::{GoOptions, Platform, go_build_of, go_lacks, wait_for};

const MODULE: &str = "github.com/containerd/nerdctl/v2";
const VERSION: &str = "v2.3.5";
const LIMIT: Duration = Duration::from_secs(30);
const PROGRAM: &str = "/usr/local/bin/nerdctl";

/// Its tests use a module that is a directory of its repository and no part of what is published.
fn without_tests(source: &Path) -> Result<()> {
    for entry in fs::read_dir(source.join("cmd/nerdctl/helpers"))? {
        let path = entry?.path();
        if path
            .file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with("testing"))
        {
            fs::remove_file(path)?;
        }
    }
    let dir = source.join("mod/tigron");
    fs::create_dir_all(&dir)?;
    fs::write(
        dir.join("go.mod"),
        "module github.com/containerd/nerdctl/mod/tigron\n",
    )?;
    Ok(())
}

fn host(platform: Platform, name: &str, gpus: &[SimGpu]) -> Result<GpuHost> {
    if let Some(reason) = go_lacks() {
        return Err(Skip::new(format!("nerdctl is not built: {reason}")).into());
    }
    let program = go_build_of(
        MODULE,
        VERSION,
        "cmd/nerdctl",
        GoOptions::default(),
        without_tests,
    )?;
    let host = GpuHost::for_test(platform, name, gpus)?;
    host.node().install(&program, PROGRAM, 0o755)?;
    Ok(host)
}

/// nerdctl on a node, for one runtime.
struct Nerdctl<'h> {
    host: &'h GpuHost,
    runtime: &'static str,
}

impl Nerdctl<'_> {
    /// What a command prints to stdout, and its exit status, if it ends within 15 s.
    fn shows(&self, words: &[&str], stdin: &str) -> Result<String> {
        let mut command = self.host.node().command("timeout");
        command.args(["--kill-after=1", "15", PROGRAM]).args(words);
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
        let output = child.wait_with_output()?;
        eprintln!("nerdctl {words:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(format!(
            "{:?} {}",
            output.status.code(),
            String::from_utf8_lossy(&output.stdout)
        ))
    }

    fn run(&self, options: &[&str], command: &[&str], stdin: &str) -> Result<String> {
        let run = [
            "run",
            "--pull",
            "never",
            "--network",
            "none",
            "--runtime",
            self.runtime,
        ];
        self.shows(&[&run, options, &[IMAGE], command].concat(), stdin)
    }
}

/// Exit statuses of its commands. `run` and `exec` report failures, and busybox's `ps` is not what `top`
/// needs.
const CODES: &str = "007110100000000000000";

/// A day with nerdctl: what each command shows.
fn day(client: &Nerdctl<'_>) -> Result<Vec<String>> {
    let mut seen = Vec::new();
    // Without any input nerdctl closes it for neither shim.
    for text in ["x\n", "two\nlines\n"] {
        seen.push(client.run(&["--rm", "-i"], &["cat"], text)?);
    }
    seen.push(client.run(&["--rm"], &["sh", "-c", "echo out; echo err >&2; exit 7"], "")?);
    seen.push(client.run(&["--rm"], &["no-such-program"], "")?);
    let made = client.run(
        &["-d", "--name", "job"],
        &[
            "sh",
            "-c",
            "echo began; trap 'exit 3' TERM; while :; do sleep 0.1; done",
        ],
        "",
    )?;
    let id = made.strip_prefix("Some(0) ").context(made.clone())?.trim();
    for words in [
        &["exec", "job", "sh", "-c", "echo in; exit 5"][..],
        &["exec", "-i", "job", "cat"],
        &["top", "job", "-o", "args"],
        &["pause", "job"],
        &["ps", "--format", "{{.Names}} {{.Status}}"],
        &["unpause", "job"],
        &["update", "--memory", "64m", "job"],
        &["stop", "job"],
        &[
            "inspect",
            "--format",
            "{{.State.Status}} {{.State.ExitCode}}",
            "job",
        ],
        &["start", "job"],
        &["logs", "job"],
        &["restart", "job"],
        &["kill", "job"],
        &["wait", "job"],
        &["rename", "job", "other"],
        &["rm", "other"],
        &["ps", "-aq"],
    ] {
        seen.push(client.shows(words, "to exec\n")?.replace(id, "ID"));
    }
    Ok(seen)
}

fn a_day_with_it_is_as_with_the_stock_shim(platform: Platform) -> Result<()> {
    on([host(platform, "ne-day", &[])?], |[node]| {
        let [stock, firn] = [STOCK, FIRN].map(|runtime| Nerdctl { host: node, runtime });
        let shown = day(&stock)?;
        assert_eq!(day(&firn)?, shown);
        let codes: Vec<&str> = shown
            .iter()
            .filter_map(|seen| seen.split(['(', ')']).nth(1))
            .collect();
        assert_eq!(codes.concat(), CODES, "{shown:?}");
        node.idle()
    })
}

const COUNT: [&str; 7] = [
    "/bin/gpu-counter",
    "--out",
    "/counter.log",
    "--interval-ms",
    "50",
    "--mib",
    "8",
];

/// The counter goes on from its checkpoint, which is older than its file, and did not begin again at 0.
fn goes_back(job: &Container<'_>) -> Result<()> {
    let found = wait_for("an iteration that was there before", LIMIT, || {
        let lines = job.lines()?.0;
        ensure!(lines.iter().all(|line| line.ok), "{lines:?}");
        let back = lines.windows(2).find(|pair| pair[1].iter <= pair[0].iter);
        Ok(back.map(|pair| pair[1].iter))
    })?;
    ensure!(found > 2, "it began again, at iteration {found}");
    Ok(())
}

/// Under firn's own name a container goes on after its checkpoint. In the stock shim's place it ends with it
/// where nerdctl asks for that. It begins again from there.
fn containers_with_gpus_go_on_from_their_checkpoints(platform: Platform) -> Result<()> {
    on([host(platform, "ne-gpu", &[SimGpu::h200(1)])?], |[node]| {
        node.drop_in()?;
        for runtime in [FIRN, STOCK] {
            let client = Nerdctl { host: node, runtime };
            let id = client.run(
                &["-d", "--name", "job", "--device", "nvidia.com/gpu=0"],
                &COUNT,
                "",
            )?;
            let id = id.strip_prefix("Some(0) ").context(id.clone())?.trim();
            let job = Container::known(node, id).counting(1);
            job.goes_on(3)?;
            let first = client.shows(&["checkpoint", "create", "--leave-running", "job", "first"], "")?;
            ensure!(first.starts_with("Some(0)"), "{first}");
            job.goes_on(3)?;
            let last = match runtime {
                STOCK => {
                    let ended = client.shows(&["checkpoint", "create", "job", "last"], "")?;
                    ensure!(ended.starts_with("Some(0)"), "{ended}");
                    "last"
                }
                _ => {
                    let killed = client.shows(&["kill", "job"], "")?;
                    ensure!(killed.starts_with("Some(0)"), "{killed}");
                    "first"
                }
            };
            let state = [
                "inspect",
                "--format",
                "{{.State.Status}} {{.State.ExitCode}}",
                "job",
            ];
            client.shows(&["wait", "job"], "")?;
            assert_eq!(client.shows(&state, "")?, "Some(0) exited 137\n");
            let started = client.shows(&["start", "--checkpoint", last, "job"], "")?;
            ensure!(started.starts_with("Some(0)"), "{started}");
            match runtime {
                STOCK => job.goes_on(3).map(drop)?,
                _ => goes_back(&job)?,
            }
            let listed = client.shows(&["checkpoint", "ls", "job"], "")?;
            ensure!(listed.contains(last), "{listed}");
            for name in ["first", "last"].into_iter().filter(|name| listed.contains(name)) {
                client.shows(&["checkpoint", "rm", "job", name], "")?;
            }
            client.shows(&["rm", "-f", "job"], "")?;
            job.nothing_left()?;
        }
        node.idle()
    })
}

fn main() -> ExitCode {
    matrix::run(&cases! {
        a_day_with_it_is_as_with_the_stock_shim [FORKY];
        containers_with_gpus_go_on_from_their_checkpoints [FORKY];
    })
}
