//! `cargo xtask cast`: a first checkpoint and restore as a terminal shows them, recorded on two test nodes.
//!
//! Commands run as they are shown; the recording has each line that they print, with its time. Between
//! commands it waits, as somebody would who reads and types.

mod draw;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use firn_lab::{Built, GpuHost, Profile, SimGpu};
use firn_node::Suite;
use serde_json::json;

/// What the counter writes, by ctr.
const LOOK: &str = "ctr tasks exec --exec-id look job tail -n 1 /counter.log | cut -d ' ' -f 6-";

/// The commands, and the node of each.
const STORY: [(Host, &str); 7] = [
    (
        Host::A,
        "ctr run --detach --runtime io.containerd.firn.v2 --device nvidia.com/gpu=0 \\\n    \
         localhost/firn-test:latest job /bin/gpu-counter --out /counter.log --interval-ms 200",
    ),
    (Host::A, LOOK),
    (Host::A, "firn checkpoint job /exchange/job.tar"),
    (Host::A, LOOK),
    (Host::B, "firn restore /exchange/job.tar --gpus 1"),
    (Host::B, LOOK),
    (Host::B, "simgpu smi"),
];
/// A directory that is copied from the first node to the second, as a file system of both would have it.
const EXCHANGE: &str = "/exchange";

/// Of the terminal, which wraps longer lines.
const COLUMNS: usize = 92;

/// The reader sees the command so long before it runs, and its output so long before the next command.
const BEFORE: Duration = Duration::from_millis(1000);
const AFTER: Duration = Duration::from_millis(2500);

const CAST: &str = "first-checkpoint.cast";
const SVG: &str = "first-checkpoint.svg";

#[derive(Clone, Copy, PartialEq, Eq)]
enum Host {
    A,
    B,
}

impl Host {
    fn name(self) -> &'static str {
        match self {
            Self::A => "gpu-a",
            Self::B => "gpu-b",
        }
    }
}

/// Record half a minute of terminal, for README.md
///
/// Runs a first checkpoint and its restore on two test nodes with simulated GPUs. Writes to DIR
/// first-checkpoint.cast (asciicast v2: every line with its time) and first-checkpoint.svg, the same to look
/// at. Needs root.
#[derive(clap::Args)]
pub struct Cmd {
    /// Where both files are written
    #[arg(long, value_name = "DIR", default_value = "docs/pictures")]
    out: PathBuf,
    /// Record nothing: only draw the recording that is there
    #[arg(long)]
    draw: bool,
}

/// Records and draws. `workspace` is the root of the source tree.
pub fn run(cmd: &Cmd, workspace: &Path) -> Result<ExitCode> {
    let dir = workspace.join(&cmd.out);
    let cast = dir.join(CAST);
    if !cmd.draw {
        fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
        fs::write(&cast, record()?).with_context(|| format!("write {}", cast.display()))?;
    }
    let recording = fs::read_to_string(&cast).with_context(|| format!("read {}", cast.display()))?;
    let svg = dir.join(SVG);
    fs::write(&svg, draw::svg(&recording)?).with_context(|| format!("write {}", svg.display()))?;
    println!("{}\n{}", cast.display(), svg.display());
    Ok(ExitCode::SUCCESS)
}

/// The recording of the whole story.
fn record() -> Result<String> {
    let built = Built::build(Profile::Dev)?;
    let start = |host: Host, gpus: [u32; 2]| {
        GpuHost::start(&built, Suite::Forky, host.name(), &gpus.map(SimGpu::h200))
    };
    let (a, b) = (start(Host::A, [0xa0, 0xa1])?, start(Host::B, [0xb0, 0xb1])?);
    for host in [&a, &b] {
        host.node().run(&["mkdir", EXCHANGE])?;
    }
    let mut recorder = Recorder {
        begun: Instant::now(),
        events: Vec::new(),
    };
    let mut last = Host::A;
    for (host, command) in STORY {
        if host != last {
            let files = [&a, &b].map(|host| host.node().path(EXCHANGE).join("job.tar"));
            fs::copy(&files[0], &files[1]).context("copy the checkpoint")?;
        }
        last = host;
        let on = match host {
            Host::A => &a,
            Host::B => &b,
        };
        recorder.run(on, host.name(), command)?;
    }
    recorder.cast()
}

/// What the terminal shows, and when.
struct Recorder {
    begun: Instant,
    events: Vec<(Duration, String)>,
}

impl Recorder {
    fn show(&mut self, text: &str) {
        let text = text.replace('\n', "\r\n");
        self.events.push((self.begun.elapsed(), text));
    }

    fn run(&mut self, host: &GpuHost, name: &str, command: &str) -> Result<()> {
        self.show(&format!("{name}# {command}\n"));
        thread::sleep(BEFORE);
        let mut child = host
            .node()
            .command("sh")
            .args(["-c", &format!("{command} 2>&1")])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("run {command}"))?;
        let output = child.stdout.take().context("the output of the command")?;
        for line in BufReader::new(output).lines() {
            self.show(&format!("{}\n", line?));
        }
        let status = child.wait()?;
        ensure!(status.success(), "{command}: {status}, {:?}", self.events);
        thread::sleep(AFTER);
        Ok(())
    }

    /// As asciicast v2 has it.
    fn cast(&self) -> Result<String> {
        let text: String = self.events.iter().map(|(_, text)| text.as_str()).collect();
        let header = json!({
            "version": 2,
            "width": COLUMNS,
            "height": text.lines().count() + 8,
            "timestamp": SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs(),
            "title": "A first checkpoint, on two test nodes with simulated GPUs",
        });
        let mut lines = vec![header.to_string()];
        // The last picture stays for a while.
        let end = (self.begun.elapsed(), String::new());
        for (at, text) in self.events.iter().chain([&end]) {
            let seconds = (at.as_secs_f64() * 1000.0).round() / 1000.0;
            lines.push(json!([seconds, "o", text]).to_string());
        }
        Ok(lines.join("\n") + "\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The picture in the pages is that of the recording, and the recording is of these commands.
    #[test]
    fn the_picture_shows_the_recording_of_the_story() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/pictures");
        let cast = fs::read_to_string(dir.join(CAST)).unwrap();
        assert_eq!(
            fs::read_to_string(dir.join(SVG)).unwrap(),
            draw::svg(&cast).unwrap()
        );
        let mut prompts = cast.lines().filter(|line| line.contains("\"o\",\"gpu-"));
        for (host, command) in STORY {
            let shown = format!("{}# {}\r\n", host.name(), command.replace('\n', "\r\n"));
            let shown = serde_json::to_string(&shown).unwrap();
            assert!(
                prompts.next().is_some_and(|line| line.contains(&shown)),
                "{shown}"
            );
        }
        assert_eq!(prompts.next(), None);
    }
}
