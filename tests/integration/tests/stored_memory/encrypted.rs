//! A node's store that is encrypted.

use anyhow::{Result, ensure};
use firn_lab::{GpuHost, failure, on};
use firn_node::Platform;

use crate::stored_memory::{STORE, expect_refused, extents, host, job, restores, send_store};

const KEY: &str = "/etc/firn/store.key";

fn configuration() -> String {
    format!("{STORE}store-key = \"{KEY}\"\n")
}

/// A key of one digit.
fn make_key(host: &GpuHost, digit: &str) -> Result<()> {
    let make = format!("umask 077; printf '{digit}%.0s' $(seq 64) >{KEY}");
    host.node().run(&["sh", "-c", &make]).map(drop)
}

/// Memory goes into the store and comes back on another node with the key, and with no other one.
pub fn an_encrypted_store_needs_its_key(platform: Platform) -> Result<()> {
    let hosts = [host(platform, "sm-key-a", 1)?, host(platform, "sm-key-b", 1)?];
    on(hosts, |[a, b]| {
        a.configure(&configuration())?;
        let job = job(a, &[])?;
        // Without the key nothing is written, and the job continues.
        let output = failure(job.checkpoint("checkpoint/job").map(drop))?;
        for part in ["FIRN-STORE-KEY:", KEY, "openssl rand -hex 32"] {
            ensure!(output.contains(part), "no {part:?} in:\n{output}");
        }
        job.goes_on(3)?;
        ensure!(!a.node().path("/srv/store").exists(), "there is a store");

        make_key(a, "5")?;
        job.checkpoint("checkpoint/job")?;
        job.goes_on(3)?;
        job.remove()?;
        ensure!(!extents(a)?.is_empty(), "nothing is in the store");
        let whole = a.node().run(&["firn", "store", "verify"])?.stdout;
        ensure!(whole.ends_with("whole\n"), "{whole}");
        restores(a)?;

        a.send_image("checkpoint/job", b)?;
        send_store(a, b)?;
        b.configure(STORE)?;
        expect_refused(b, "FIRN-STORE-KEY")?;
        b.configure(&configuration())?;
        make_key(b, "5")?;
        restores(b)?;
        make_key(b, "6")?;
        expect_refused(b, "FIRN-STORE-KEY")
    })
}
