//! Places for checkpoints that are on file systems of their own.

use anyhow::{Context, Result, ensure};
use firn_lab::{GC, failure, on};
use firn_node::Platform;

use crate::stored_memory::{STORE, extents, host, job};

/// Where pods' checkpoints and rescued images are, each a mount of a directory below /srv/disks.
const PLACES: &str = "[restore]\nfrom-dir = \"/srv/warm\"\n[checkpoint]\nrescue-dir = \"/srv/rescued\"\n";

/// gc removes nothing while a place is not mounted that was, whatever was stated of its checkpoints.
pub fn gc_removes_nothing_while_checkpoints_are_not_mounted(platform: Platform) -> Result<()> {
    on([host(platform, "sm-roots", 1)?], |[host]| {
        host.configure(&format!("{STORE}{PLACES}"))?;
        let node = host.node();
        for name in ["warm", "rescued"] {
            let (disk, place) = (format!("/srv/disks/{name}"), format!("/srv/{name}"));
            node.run(&["mkdir", "-p", &disk, &place])?;
            node.run(&["mount", "--bind", &disk, &place])?;
        }
        let job = job(host, &["--runtime", host.runtime_for_options()?])?;
        job.checkpoint_and_exit("/srv/image")?;
        let before = job.lines()?.reached(1);
        job.task(&["delete"])?;
        let listed = host.firn(&["store", "ls"])?;
        let id = listed["images"][0]["id"].as_str().context("no id")?.to_owned();

        for (name, image) in [
            ("warm", "/srv/warm/default/warm"),
            ("rescued", "/srv/rescued/job"),
        ] {
            let place = format!("/srv/{name}");
            let parent = image.rsplit_once('/').context("a path")?.0;
            node.run(&["mkdir", "-p", parent])?;
            node.run(&["mv", "/srv/image", image])?;
            let kept = node.run(&GC)?.stdout;
            ensure!(kept.contains(&format!("{image} is there")), "{kept}");
            // Whoever states it does not know better.
            node.run(&["firn", "store", "unpin", &id])?;
            node.run(&["umount", &place])?;
            let output = failure(node.run(&GC).map(drop))?;
            for part in [
                "FIRN-STORE-UNUSABLE",
                "is not mounted",
                &place,
                "nothing was removed",
            ] {
                ensure!(output.contains(part), "no {part:?} in:\n{output}");
            }
            ensure!(!extents(host)?.is_empty(), "memory is gone that {image} needs");
            node.run(&["mount", "--bind", &format!("/srv/disks/{name}"), &place])?;
            let kept = node.run(&GC)?.stdout;
            ensure!(kept.contains(&format!("{image} is there")), "{kept}");
            node.run(&["mv", image, "/srv/image"])?;
        }

        // A checkpoint that was moved: nothing names it, and nobody has stated that it is gone.
        node.run(&["firn", "store", "pin", &id])?;
        node.run(&["mkdir", "/srv/archive"])?;
        node.run(&["mv", "/srv/image", "/srv/archive/image"])?;
        node.run(&GC)?;
        node.run(&["firn", "restore", "--dir", "/srv/archive/image", "job"])?;
        let lines = job.goes_on(3)?;
        let goes_on = lines.0.iter().any(|line| line.iter == before + 1);
        ensure!(goes_on, "it was started afresh");
        job.remove()?;
        node.run(&["firn", "store", "unpin", &id])?;
        node.run(&["firn", "store", "gc", "--grace", "0s"])?;
        ensure!(
            extents(host)?.is_empty(),
            "memory is left that was stated to be gone"
        );
        host.idle()
    })
}
