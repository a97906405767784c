//! What depends on the store shows it, is pinned, and shows when its memory is missing.

use anyhow::{Result, ensure};
use firn_lab::on;
use firn_node::Platform;

use crate::stored_memory::{STORE, host, job};

const DIR: &str = "/srv/of-job";
const REF: &str = "checkpoint/of-job";

pub fn what_depends_on_the_store_shows_it(platform: Platform) -> Result<()> {
    on([host(platform, "sm-looks", 1)?], |[host]| {
        host.configure(STORE)?;
        let node = host.node();
        let job = job(host, &[])?;
        let shown = node.run(&["firn", "checkpoint", "job", DIR])?.stdout;
        ensure!(
            shown.contains("\nmemory: ") && shown.contains(" in store "),
            "where its memory is, is not shown:\n{shown}"
        );
        job.goes_on(3)?;
        let made = host.firn(&["checkpoint", "job", REF])?;
        ensure!(
            made["memory"]["bytes"].as_u64() > Some(100 << 20) && made["memory"]["pinned"] == true,
            "{made}"
        );
        job.goes_on(3)?;
        job.remove()?;
        let count = || -> Result<usize> {
            let listed = host.firn(&["store", "ls"])?["images"].clone();
            Ok(listed.as_array().map_or(0, Vec::len))
        };
        let gc = ["firn", "store", "gc", "--grace", "0s"];
        // Nothing is seen to name that of the directory.
        node.run(&[&gc[..], &["--unreferenced-since", "0s"]].concat())?;
        ensure!(count()? == 2, "gc has removed what is pinned");

        node.run(&["sh", "-c", "firn-gpu inventory >/srv/inventory.json"])?;
        let given = "--inventory=/srv/inventory.json";
        let given = ["firn", "restore", REF, "--dry-run", given];
        let looks: [&[&str]; 6] = [
            &["firn", "inspect", DIR],
            &["firn", "inspect", REF],
            &["firn", "audit", DIR],
            &given,
            &["firn", "restore", REF, "--name", "copy", "--dry-run"],
            &["firn", "images", "ls"],
        ];
        for look in looks {
            node.run(look)?;
        }
        node.run(&["mv", "/srv/store/images", "/srv/images"])?;
        node.run(&["mkdir", "-m", "700", "/srv/store/images"])?;
        for look in looks {
            let shown = host.output_of(look, "")?;
            // A restore would be refused.
            let status = if look.contains(&"--dry-run") { 3 } else { 1 };
            ensure!(
                shown.code == Some(status) && shown.text().contains("memory missing"),
                "{look:?}: {shown}"
            );
        }
        node.run(&["rmdir", "/srv/store/images"])?;
        node.run(&["mv", "/srv/images", "/srv/store/images"])?;
        node.run(&["firn", "images", "prune", REF])?;
        node.run(&gc)?;
        ensure!(count()? == 1, "gc has kept what prune has released");
        host.idle()
    })
}
