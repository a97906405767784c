//! containerd's events, as `ctr events` prints them.

use std::io::{BufRead, BufReader};
use std::process::Child;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::{GpuHost, IMAGE};

/// How long an event may take, on a machine that has much else to do.
const LIMIT: Duration = Duration::from_secs(30);

/// An event of a task.
#[derive(Clone, Debug)]
pub struct Event {
    /// `/tasks/exit`.
    pub topic: String,
    /// Its text.
    pub fields: Value,
}

impl Event {
    /// From a line of `ctr events`; none for what is not of a task.
    fn parse(line: &str) -> Option<Self> {
        let (before, fields) = line.split_at(line.find(" {")?);
        let topic = before
            .split_whitespace()
            .find(|word| word.starts_with("/tasks/"))?;
        Some(Self {
            topic: topic.to_owned(),
            fields: serde_json::from_str(fields.trim()).ok()?,
        })
    }

    /// The last part of its topic.
    pub fn name(&self) -> &str {
        self.topic.rsplit('/').next().unwrap_or_default()
    }

    /// The process that it is about, if it names one: an exec's id, or the container's for init.
    pub fn process(&self) -> &str {
        let field = |name: &str| self.fields[name].as_str();
        field("exec_id").or_else(|| field("id")).unwrap_or_default()
    }

    /// Whether it is of this topic and about this process.
    pub fn is(&self, topic: &str, process: &str) -> bool {
        self.topic == topic && self.process() == process
    }

    /// Its topic and fields, of pids and times only whether they are there, and no numbers in paths.
    pub fn without_times(&self) -> String {
        let mut fields = self.fields.clone();
        blank(&mut fields);
        format!("{} {fields}", self.topic)
    }
}

fn blank(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                match (name.as_str(), &*value) {
                    ("pid", pid) if *pid != 0 => *value = "set".into(),
                    ("exited_at", time) => {
                        let text = time.to_string();
                        let zero = text.contains("-62135596800") || text.contains("0001-01-01");
                        *value = if zero { "zero" } else { "set" }.into();
                    }
                    _ => blank(value),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(blank),
        Value::String(text) if text.contains('/') => {
            let mut last = ' ';
            let digits = |c: char| if c.is_ascii_digit() { '0' } else { c };
            text.retain(|c| {
                let kept = !(c.is_ascii_digit() && last.is_ascii_digit());
                last = c;
                kept
            });
            *text = text.chars().map(digits).collect();
        }
        _ => {}
    }
}

/// containerd's events since [`GpuHost::watch_events`].
pub struct Events {
    ctr: Child,
    heard: mpsc::Receiver<String>,
    lines: Vec<String>,
}

impl Events {
    /// The task events of a container up to the first one of this topic, and, when it is named, about this
    /// process.
    pub fn of(&mut self, container: &str, topic: &str, process: &str) -> Result<Vec<Event>> {
        loop {
            let events = self.lines.iter().filter_map(|line| Event::parse(line));
            let own = |event: &Event| event.fields["container_id"] == container;
            let events: Vec<Event> = events.filter(own).collect();
            let wanted =
                |event: &Event| event.topic == topic && (process.is_empty() || event.process() == process);
            if let Some(last) = events.iter().position(wanted) {
                return Ok(events[..=last].to_vec());
            }
            let line = self.heard.recv_timeout(LIMIT).with_context(|| {
                let topics: Vec<&str> = events.iter().map(|event| event.topic.as_str()).collect();
                format!("no {topic} of {container} {process} after {topics:?}")
            })?;
            self.lines.push(line);
        }
    }

    /// Waits until a container has had so many events of this topic.
    pub fn wait_for(&mut self, container: &str, topic: &str, count: usize) -> Result<()> {
        loop {
            let events = self.lines.iter().filter_map(|line| Event::parse(line));
            let wanted = |event: &Event| event.topic == topic && event.fields["container_id"] == container;
            let seen = events.filter(wanted).count();
            if seen >= count {
                return Ok(());
            }
            let line = self.heard.recv_timeout(LIMIT);
            self.lines
                .push(line.with_context(|| format!("{seen} {topic} of {container}, not {count}"))?);
        }
    }

    /// Topics of the task events of a container up to the end of its init, in order.
    ///
    /// Not further: containerd's own shim loses the deletion that follows now and then.
    pub fn until_exit(mut self, container: &str) -> Result<String> {
        let events = self.of(container, "/tasks/exit", container)?;
        let topics: Vec<&str> = events.iter().map(|event| event.topic.as_str()).collect();
        Ok(topics.join("\n"))
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

    /// Every line up to the first one that has this in it.
    pub fn until(&mut self, part: &str) -> Result<Vec<String>> {
        while !self.lines.last().is_some_and(|line| line.contains(part)) {
            let line = self.heard.recv_timeout(LIMIT);
            self.lines
                .push(line.with_context(|| format!("no {part:?} after {:?}", self.lines))?);
        }
        Ok(std::mem::take(&mut self.lines))
    }

    /// Every line up to now: until it prints a mark that is made here.
    pub fn until_now(mut self, host: &GpuHost) -> Result<Vec<String>> {
        let mark = "localhost/until-now:latest";
        host.node()
            .run(&["ctr", "images", "tag", "--force", IMAGE, mark])?;
        loop {
            let line = self
                .heard
                .recv_timeout(LIMIT)
                .context("the mark is not printed")?;
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
        let mut output = BufReader::new(ctr.stdout.take().context("ctr has no output")?);
        // It prints nothing before the first event. One that has no container in it shows that it listens.
        let (sender, heard) = mpsc::channel();
        thread::spawn(move || {
            let mut line = String::new();
            while output.read_line(&mut line).is_ok_and(|got| got > 0) {
                if sender.send(std::mem::take(&mut line)).is_err() {
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
                Err(_) => ensure!(begun.elapsed() < LIMIT, "ctr prints no events"),
            }
        };
        Ok(Events {
            ctr,
            heard,
            lines: vec![first],
        })
    }
}
