//! How long each phase of a transaction took.
//!
//! Measured once: the same figures go to the log and, as JSON, to a file in the bundle for people and scripts that
//! want to see where the time went.

use std::path::Path;
use std::time::Instant;

use serde::Serialize;

/// File in the bundle with the last account, replaced by the next transaction.
pub const FILE: &str = "firn-account.json";

#[derive(Serialize)]
struct Phase {
    name: &'static str,
    ms: f64,
}

/// The account of one transaction.
#[derive(Serialize)]
pub struct Account {
    op: &'static str,
    container: String,
    phases: Vec<Phase>,
    total_ms: f64,
    ok: bool,
    #[serde(skip)]
    begun: Instant,
    #[serde(skip)]
    last: Instant,
}

impl Account {
    /// Begins to measure.
    pub fn begin(op: &'static str, container: &str) -> Self {
        let now = Instant::now();
        Self {
            op,
            container: container.to_owned(),
            phases: Vec::new(),
            total_ms: 0.0,
            ok: false,
            begun: now,
            last: now,
        }
    }

    /// What was done since the last mark was `name`.
    pub fn mark(&mut self, name: &'static str) {
        let now = Instant::now();
        let ms = now.duration_since(self.last).as_secs_f64() * 1000.0;
        self.last = now;
        log::info!(
            "op={} container={} phase={name} ms={ms:.1}",
            self.op,
            self.container
        );
        self.phases.push(Phase { name, ms });
    }

    /// Ends it and leaves the figures in the bundle. That is a convenience: a full disk spoils no transaction.
    pub fn end(mut self, bundle: &Path, ok: bool) {
        self.total_ms = self.begun.elapsed().as_secs_f64() * 1000.0;
        self.ok = ok;
        log::info!(
            "op={} container={} ok={ok} ms={:.1}",
            self.op,
            self.container,
            self.total_ms
        );
        let written = serde_json::to_vec(&self)
            .map_err(std::io::Error::from)
            .and_then(|json| std::fs::write(bundle.join(FILE), json));
        if let Err(error) = written {
            log::warn!("cannot write {FILE}: {error}");
        }
    }
}
