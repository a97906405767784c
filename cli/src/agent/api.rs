//! The one call of Kubernetes' API that the agent makes: it changes labels of its node.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use reqwest::{Certificate, Client, Url};
use serde_json::json;

/// Where Kubernetes gives a pod what it needs for the API.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
const LIMIT: Duration = Duration::from_secs(30);

pub struct Api {
    client: Client,
    node: Url,
}

impl Api {
    /// For the node of this name, from a pod with a service account.
    pub fn of_node(name: &str) -> Result<Self> {
        let variable = |name: &str| {
            env::var(name)
                .with_context(|| format!("{name} is not set: this is no pod with a service account"))
        };
        let (host, port) = (
            variable("KUBERNETES_SERVICE_HOST")?,
            variable("KUBERNETES_SERVICE_PORT")?,
        );
        let host = if host.contains(':') {
            format!("[{host}]")
        } else {
            host
        };
        let mut node: Url = format!("https://{host}:{port}/api/v1/nodes").parse()?;
        let segments = node.path_segments_mut();
        segments.map_err(|()| anyhow::anyhow!("no path"))?.push(name);
        // Another one may have been chosen already, by a part of this process.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let authority = Path::new(ACCOUNT).join("ca.crt");
        let authority = fs::read(&authority).with_context(|| format!("read {}", authority.display()))?;
        let client = Client::builder()
            .tls_certs_only(Certificate::from_pem_bundle(&authority)?)
            .timeout(LIMIT)
            .build()?;
        Ok(Self { client, node })
    }

    /// Sets labels, and removes those without a value.
    pub async fn label(&self, labels: &BTreeMap<&str, Option<String>>) -> Result<()> {
        // The kubelet replaces it before it expires.
        let token = Path::new(ACCOUNT).join("token");
        let token = fs::read_to_string(&token).with_context(|| format!("read {}", token.display()))?;
        let request = self
            .client
            .patch(self.node.clone())
            .bearer_auth(token.trim())
            .header("Content-Type", "application/merge-patch+json")
            .body(json!({"metadata": {"labels": labels}}).to_string());
        let answer = request.send().await.context("label the node")?;
        let status = answer.status();
        let message = answer.text().await.unwrap_or_default();
        ensure!(
            status.is_success(),
            "Kubernetes does not label the node: {status}: {message}"
        );
        Ok(())
    }
}
