//! Output into files and by URIs: `file://`, and schemes that no shim knows.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use anyhow::Result;
use firn_lab::{BUNDLES, Container, failure};
use firn_node::wait_for;

use crate::conformance::Place;
use crate::conformance::client::{Client, ID, LIMIT, Stdio, clean, logged, path};
use crate::conformance::stdio::sorted;

pub fn file_made(place: &Place<'_>) -> Result<String> {
    let log = path("deep/er/log");
    let code = logged(place, &format!("file://{log}"), "echo out")?;
    let mode = |path: &str| {
        let mode = fs::metadata(place.node().path(path))?.permissions().mode();
        Ok::<_, std::io::Error>(mode & 0o7777)
    };
    let (dir, file) = (mode(&path("deep/er"))?, mode(&log)?);
    let text = place.node().read(&log)?;
    clean(place)?;
    Ok(format!("code {code}, dir {dir:o}, file {file:o}, {text:?}"))
}

pub fn file_appended(place: &Place<'_>) -> Result<String> {
    let log = path("log");
    let uri = format!("file://{log}");
    let mut text = String::new();
    for round in [1, 2] {
        // As for the exec below.
        let script =
            format!("echo out {round}; echo err {round} >&2; until [ -e /logged ]; do sleep 0.05; done");
        let container = place.start(ID, &["--log-uri", &uri], &script)?;
        wait_for("both lines", LIMIT, || {
            text = place.node().read(&log).unwrap_or_default();
            Ok((text.lines().count() == 2 * round && text.ends_with('\n')).then_some(()))
        })?;
        place.node().write(format!("{BUNDLES}/{ID}/rootfs/logged"), "")?;
        container.becomes("STOPPED")?;
        container.exit_code()?;
        container.forget()?;
    }
    clean(place)?;
    Ok(sorted(&text))
}

pub fn file_exec(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let log = path("new/log");
    let uri = format!("file://{log}");
    let stdio = Stdio {
        stdout: &uri,
        stderr: &uri,
        ..Stdio::default()
    };
    // The stock shim loses a line when the process ends before both copies have begun.
    let script = "echo out; echo err >&2; until [ -e /logged ]; do sleep 0.05; done";
    client.exec("e", &stdio, script)?;
    let seen = wait_for("both lines", LIMIT, || {
        let seen = sorted(&place.node().read(&log).unwrap_or_default());
        Ok(seen
            .contains("out")
            .then_some(seen)
            .filter(|seen| seen.contains("err")))
    })?;
    place.node().write(format!("{BUNDLES}/{ID}/rootfs/logged"), "")?;
    client.finish("e")?;
    client.end()?;
    Ok(seen)
}

pub fn file_refused(place: &Place<'_>) -> Result<String> {
    place.node().write(path("file"), "")?;
    let uri = format!("file://{}/log", path("file"));
    let output = failure(place.start("c", &["--log-uri", &uri], "true"))?;
    // ctr leaves the container of a task that could not be made.
    place.host.ctr(&["containers", "delete", "c"], "")?;
    firn_lab::nothing_left(place.host, "c")?;
    clean(place)?;
    Ok(format!("refused, names it: {}", output.contains(&path("file"))))
}

pub fn unknown_scheme(place: &Place<'_>) -> Result<String> {
    let output = match place.start("c", &["--log-uri", "nosuch:///log"], "true") {
        Ok(container) => {
            Container::remove(container)?;
            return Ok("taken".to_owned());
        }
        Err(error) => format!("{error:#}"),
    };
    place.host.ctr(&["containers", "delete", "c"], "")?;
    firn_lab::nothing_left(place.host, "c")?;
    let text = output
        .lines()
        .find(|line| line.contains("scheme"))
        .unwrap_or(&output);
    let at = text.find("unknown").unwrap_or_default();
    Ok(text[at..].trim().to_owned())
}
