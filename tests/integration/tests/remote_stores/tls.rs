//! An object store behind TLS.

use std::process::Command;

use anyhow::{Result, ensure};
use firn_lab::{Skip, answer};
use tempfile::TempDir;

use crate::remote_stores::gateway::Gateway;
use crate::remote_stores::{BUCKET, EXTENTS, Lab, SIZE, URL, expect_refused};

/// A certificate of this machine, and its key, which nobody knows.
struct Certificate(TempDir);

impl Certificate {
    /// Skips the trial where there is no openssl.
    fn make() -> Result<Self> {
        let made = Self(tempfile::tempdir()?);
        let mut openssl = Command::new("openssl");
        openssl.args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]);
        openssl.args(["-subj", "/CN=firn", "-addext", "subjectAltName=IP:127.0.0.1"]);
        openssl.args(["-addext", "basicConstraints=critical,CA:FALSE"]);
        openssl.args(["-keyout", &made.file("key"), "-out", &made.file("pem")]);
        match openssl.output() {
            Err(error) => Err(Skip::new(format!("no openssl: {error}")).into()),
            Ok(output) => {
                ensure!(output.status.success(), "{}", crate::remote_stores::all(&output));
                Ok(made)
            }
        }
    }

    fn file(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }
}

/// A certificate is compared with those that the system trusts, or those of a file.
pub fn a_certificate_is_compared() -> Result<()> {
    let (lab, certificate) = (Lab::new()?, Certificate::make()?);
    let (pem, key) = (certificate.file("pem"), certificate.file("key"));
    let gateway = Gateway::start_with(BUCKET, &["--cert", &pem, "--key", &key])?;
    let push = |arguments: &[&str]| -> Result<Command> {
        let mut push = lab.command("a", arguments)?;
        push.env("AWS_ENDPOINT_URL", format!("https://{}", gateway.address));
        push.env_remove("AWS_ALLOW_HTTP");
        Ok(push)
    };
    let unknown = push(&["push", URL])?.output()?;
    expect_refused(&unknown, "FIRN-STORE-REMOTE", &["certificate", "UnknownIssuer"])?;
    let trusted = push(&["push", URL, "--json"])?
        .env("SSL_CERT_FILE", &pem)
        .output()?;
    ensure!(
        trusted.status.success(),
        "{}",
        crate::remote_stores::all(&trusted)
    );
    let pushed = answer(&["store", "push"], &String::from_utf8(trusted.stdout)?)?;
    ensure!(pushed["copied"][0]["written"] == EXTENTS * SIZE, "{pushed}");
    Ok(())
}
