//! `firn node-agent`: keeps firn installed on a node of Kubernetes, and the node's labels true.
//!
//! What it does to the node are calls of this program, with the node's root directory as theirs. It has no
//! state: SIGTERM ends it anywhere, and the next one continues.

mod api;
pub mod args;
pub mod labels;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, bail};
use firn_config::names;
use serde::Deserialize;

use self::api::Api;
use self::args::NodeAgentArgs;
use self::labels::{FAILED, OF_NODE, READY, RESTART};
use crate::containerd::block_on;
use crate::output::{line, note};
use crate::program;

/// How long a call may take, with a restart of containerd.
const LIMIT: Duration = Duration::from_secs(300);

type Labels = BTreeMap<String, String>;

pub fn run(args: &NodeAgentArgs) -> Result<bool> {
    let from = match &args.from {
        Some(from) => from.clone(),
        None => std::env::current_exe()?
            .parent()
            .map(Path::to_owned)
            .unwrap_or_default(),
    };
    let api = Api::of_node(&args.node)?;
    let mut agent = Agent {
        args,
        from,
        api,
        shown: Labels::new(),
        removed: false,
    };
    let mut failure = String::new();
    loop {
        let done = if args.remove {
            agent.remove()
        } else {
            agent.install()
        };
        // The node or the API server may be in order again later.
        let error = done.err().map(|error| format!("{error:#}")).unwrap_or_default();
        if error != failure && !error.is_empty() {
            note!("firn: {error}");
        }
        failure = error;
        sleep(Duration::from_secs(args.every.max(1)));
    }
}

/// What of the report of `firn install` matters here.
#[derive(Deserialize)]
struct Installed {
    restart: bool,
}

/// What `firn install` reports if it fails.
#[derive(Default, Deserialize)]
struct Failed {
    failure: String,
}

struct Agent<'a> {
    args: &'a NodeAgentArgs,
    from: PathBuf,
    api: Api,
    /// The labels that the node has.
    shown: Labels,
    /// Whether firn has been removed.
    removed: bool,
}

impl Agent<'_> {
    /// Installs what is missing on the node, and labels it as it is then.
    fn install(&mut self) -> Result<()> {
        let from = self.from.to_string_lossy();
        let installed = self.firn(&["install", "--containerd", "--from", &from]);
        let runtime = match &installed {
            Ok(printed) => {
                if serde_json::from_str::<Installed>(printed)?.restart {
                    RESTART
                } else {
                    READY
                }
            }
            Err(_) => FAILED,
        };
        let mut labels: Labels = serde_json::from_str(&self.firn(&["labels"])?)?;
        labels.insert(names::LABEL_RUNTIME.to_owned(), runtime.to_owned());
        if self.shown != labels {
            let none = OF_NODE.into_iter().map(|label| (label, None));
            let known = labels
                .iter()
                .map(|(label, value)| (label.as_str(), Some(value.clone())));
            block_on(self.api.label(&none.chain(known).collect()))??;
            labels.iter().for_each(|(label, value)| line!("{label}={value}"));
            self.shown = labels;
        }
        installed.map(drop)
    }

    /// No pod comes any more, those that are there end as they do, and then firn goes.
    fn remove(&mut self) -> Result<()> {
        if self.removed {
            return Ok(());
        }
        let none = OF_NODE
            .into_iter()
            .chain([names::LABEL_RUNTIME])
            .map(|label| (label, None));
        block_on(self.api.label(&none.collect()))??;
        self.firn(&["uninstall"])?;
        line!("firn is removed");
        self.removed = true;
        Ok(())
    }

    /// Calls this program for the node, and returns the JSON that it prints.
    fn firn(&self, arguments: &[&str]) -> Result<String> {
        let root = self.args.root.to_string_lossy();
        let restart = self.args.restart && arguments[0] != "labels";
        let all = [
            arguments,
            &["--json", "--root", &root],
            if restart { &["--restart"] } else { &[] },
        ]
        .concat();
        let output = program::run(Path::new("/proc/self/exe"), &all, LIMIT)?;
        if !output.success {
            let failed: Failed = serde_json::from_str(&output.stdout).unwrap_or_default();
            bail!(
                "firn {}: {}{}",
                arguments[0],
                failed.failure,
                output.stderr.trim()
            );
        }
        Ok(output.stdout)
    }
}
