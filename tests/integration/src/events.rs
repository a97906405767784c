//! containerd's events, as `ctr events` tells them.

use std::io::{BufRead, BufReader};
use std::process::Child;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::{GpuHost, IMAGE};

/// How long an event may take.
const LIMIT: Duration = Duration::from_secs(15);

/// containerd's events since [`GpuHost::watch_events`].
pub struct Events {
    ctr: Child,
    heard: mpsc::Receiver<String>,
    lines: Vec<String>,
}

impl Events {
    /// Topics of the task events of a container up to the end of its init, in order.
    ///
    /// Not further: containerd's own shim loses the deletion that follows now and then.
    pub fn until_exit(mut self, container: &str) -> Result<String> {
        let mut topics = Vec::new();
        let own = format!("\"container_id\":\"{container}\"");
        let init = format!("\"id\":\"{container}\"");
        loop {
            let line = match self.lines.pop() {
                Some(line) => line,
                None => {
                    let heard = self.heard.recv_timeout(LIMIT);
                    heard.with_context(|| format!("no end of init after {topics:?}"))?
                }
            };
            let topic = line.split_whitespace().find(|word| word.starts_with("/tasks/"));
            let Some(topic) = topic.filter(|_| line.contains(&own)) else {
                continue;
            };
            topics.push(topic.to_owned());
            if topic == "/tasks/exit" && line.contains(&init) {
                return Ok(topics.join("\n"));
            }
        }
    }

    /// Every line up to the deletion of the last of these containers' tasks.
    pub fn until_deleted(mut self, containers: &[&str]) -> Result<Vec<String>> {
        let mut left: Vec<String> = containers
            .iter()
            .map(|id| format!("\"container_id\":\"{id}\""))
            .collect();
        while !left.is_empty() {
            let line = self.heard.recv_timeout(LIMIT);
            let line = line.with_context(|| format!("no deletion of {left:?}"))?;
            if line.contains(" /tasks/delete ") {
                left.retain(|id| !line.contains(id));
            }
            self.lines.push(line);
        }
        Ok(std::mem::take(&mut self.lines))
    }

    /// Every line up to now: until it tells of a mark that is made here.
    pub fn until_now(mut self, host: &GpuHost) -> Result<Vec<String>> {
        let mark = "localhost/until-now:latest";
        host.node()
            .run(&["ctr", "images", "tag", "--force", IMAGE, mark])?;
        loop {
            let line = self.heard.recv_timeout(LIMIT).context("the mark is not told")?;
            if line.contains(mark) {
                return Ok(std::mem::take(&mut self.lines));
            }
            self.lines.push(line);
        }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        // It may have ended with its node.
        let _ = self.ctr.kill();
        let _ = self.ctr.wait();
    }
}

impl GpuHost {
    /// Begins to note containerd's events.
    pub fn watch_events(&self) -> Result<Events> {
        let mut ctr = self.node().spawn(&["ctr", "events"])?;
        let mut said = BufReader::new(ctr.stdout.take().context("ctr has no output")?);
        // It tells nothing before the first event. One that has no container in it says that it listens.
        let (tell, heard) = mpsc::channel();
        thread::spawn(move || {
            let mut line = String::new();
            while said.read_line(&mut line).is_ok_and(|got| got > 0) {
                if tell.send(std::mem::take(&mut line)).is_err() {
                    return;
                }
            }
        });
        let (busy, begun) = ("localhost/listening:latest", Instant::now());
        let first = loop {
            self.node()
                .run(&["ctr", "images", "tag", "--force", IMAGE, busy])?;
            match heard.recv_timeout(Duration::from_millis(50)) {
                Ok(line) => break line,
                Err(_) => ensure!(begun.elapsed() < LIMIT, "ctr tells no events"),
            }
        };
        Ok(Events {
            ctr,
            heard,
            lines: vec![first],
        })
    }
}
