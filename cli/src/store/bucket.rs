//! A store in a bucket of an object store, with the names that a store's directory has.
//!
//! An object is there as a whole or not at all, so nothing is written under another name first. What is read
//! is compared with its name, as everywhere.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fmt;
use std::future::Future;
use std::path::Path as DirPath;
use std::time::Duration;

use firn_host::Problem;
use firn_image::store::{Description, Digest, EXTENT, EXTENTS, IMAGES, Index, IndexError, StoreError};
use futures_util::TryStreamExt;
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey};
use object_store::client::ClientConfigKey;
use object_store::path::Path;
use object_store::{BackoffConfig, ObjectStore, ObjectStoreExt, RetryConfig};
use tokio::runtime::Runtime;

use super::origin::{Fault, Origin};

const SCHEME: &str = "s3://";

/// Requests at the same time: one alone waits most of its time.
const THREADS: usize = 16;

/// Most time that a request takes, with its content.
const TIMEOUT: &str = "120s";

/// A request that fails is made again with pauses, some ten seconds altogether.
const RETRIES: usize = 8;
const LONGEST_PAUSE: Duration = Duration::from_secs(4);
/// And not after this time, when a signature may have expired.
const RETRY_TIME: Duration = Duration::from_secs(240);

const PUSH: &str = "`firn store push URL ID` on a node that has the memory brings it there";
const REPLACE: &str =
    "remove that object; then `firn store push URL ID` on a node that has the memory brings it again";

/// A bucket that cannot be used, or lacks what is looked for.
#[derive(Debug, thiserror::Error, Problem)]
#[problem(
    "FIRN-STORE-REMOTE",
    "check AWS_ENDPOINT_URL (http:// needs AWS_ALLOW_HTTP=true), AWS_REGION, AWS_ACCESS_KEY_ID and the \
     network; what was copied stays, so the same command goes on"
)]
pub enum BucketError {
    #[error("{url} names no bucket")]
    #[problem("FIRN-STORE-UNUSABLE", "write s3://BUCKET or s3://BUCKET/PREFIX")]
    Url { url: String },
    /// The settings in the environment do not fit together.
    #[error("cannot connect to {url}")]
    #[problem("FIRN-STORE-UNUSABLE", "check the variables AWS_* of the environment")]
    Settings { url: String, source: Cause },
    #[error("cannot start threads")]
    #[problem("FIRN-STORE-IO", "see whether this user may start more threads")]
    Threads(#[source] std::io::Error),
    #[error("the object store has no bucket for {url}")]
    #[problem(
        "FIRN-STORE-UNUSABLE",
        "make the bucket, or check its name and AWS_ENDPOINT_URL"
    )]
    NoBucket { url: String },
    #[error("there is no store at {url}")]
    #[problem(
        "FIRN-STORE-UNUSABLE",
        "name the bucket and prefix that `firn store push` has written to"
    )]
    Absent { url: String },
    #[error("store {id} at {url} lacks {kind} {digest}")]
    #[problem("FIRN-STORE-MISSING", PUSH)]
    Missing {
        url: String,
        id: String,
        /// `extent` or `index`.
        kind: &'static str,
        digest: Digest,
    },
    #[error("extent {object} is damaged")]
    #[problem("FIRN-STORE-DAMAGED", REPLACE)]
    Extent { object: String },
    #[error("index {object} cannot be used")]
    #[problem("FIRN-STORE-DAMAGED", REPLACE)]
    Index { object: String, source: IndexError },
    /// Its description is that of something else.
    #[error(transparent)]
    Description(#[from] StoreError),
    #[error("the object store does not permit to {action} {object}")]
    #[problem(
        "FIRN-STORE-REMOTE",
        "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY: their user has to list the bucket and to read \
         its objects, and for a push to write them"
    )]
    Denied {
        action: &'static str,
        object: String,
        source: Cause,
    },
    #[error("cannot {action} {object}")]
    Request {
        action: &'static str,
        object: String,
        source: Cause,
    },
}

/// An error of the library in one line: it repeats some of its causes and omits others.
#[derive(Debug)]
pub struct Cause(object_store::Error);

impl Error for Cause {}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = self.0.to_string();
        let mut cause = self.0.source();
        while let Some(error) = cause {
            let part = error.to_string();
            if !text.contains(&part) {
                text = format!("{text}: {part}");
            }
            cause = error.source();
        }
        f.write_str(&text)
    }
}

/// A store at `s3://BUCKET/PREFIX`. Several threads may use it at once.
pub struct Bucket {
    /// As its user names it.
    url: String,
    prefix: Path,
    /// The random id of the store.
    id: String,
    objects: AmazonS3,
    runtime: Runtime,
}

impl Bucket {
    /// The store there.
    pub fn open(url: &str) -> Result<Self, BucketError> {
        let mut bucket = Self::connect(url)?;
        let found = bucket.description()?;
        let description = found.ok_or_else(|| BucketError::Absent {
            url: bucket.url.clone(),
        })?;
        description.id().clone_into(&mut bucket.id);
        Ok(bucket)
    }

    /// The store there, which is made where there is none.
    pub fn create(url: &str) -> Result<Self, BucketError> {
        let mut bucket = Self::connect(url)?;
        let description = match bucket.description()? {
            Some(description) => description,
            None => {
                let new = Description::random()?;
                bucket.put(Description::NAME, new.to_bytes(DirPath::new(url))?)?;
                new
            }
        };
        description.id().clone_into(&mut bucket.id);
        Ok(bucket)
    }

    /// Connects with the settings of the environment. Nothing is sent yet.
    fn connect(url: &str) -> Result<Self, BucketError> {
        let name = url.strip_prefix(SCHEME).unwrap_or(url).trim_end_matches('/');
        let url = format!("{SCHEME}{name}");
        let (bucket, prefix) = name.split_once('/').unwrap_or((name, ""));
        let Some(prefix) = Path::parse(prefix).ok().filter(|_| !bucket.is_empty()) else {
            return Err(BucketError::Url { url });
        };
        // Another provider may have been chosen for the process before: that one does as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let timeout = AmazonS3ConfigKey::Client(ClientConfigKey::Timeout);
        let objects = AmazonS3Builder::from_env()
            .with_bucket_name(bucket)
            .with_config(timeout, TIMEOUT)
            .with_retry(RetryConfig {
                backoff: BackoffConfig {
                    max_backoff: LONGEST_PAUSE,
                    ..BackoffConfig::default()
                },
                max_retries: RETRIES,
                retry_timeout: RETRY_TIME,
            })
            .build();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build();
        match objects {
            Ok(objects) => Ok(Self {
                url,
                prefix,
                id: String::new(),
                objects,
                runtime: runtime.map_err(BucketError::Threads)?,
            }),
            Err(source) => Err(BucketError::Settings {
                url,
                source: Cause(source),
            }),
        }
    }

    fn description(&self) -> Result<Option<Description>, BucketError> {
        let bytes = self.get(Description::NAME, Description::MAX_BYTES)?;
        let read = |bytes: Vec<u8>| Description::from_bytes(&bytes, DirPath::new(&self.url));
        Ok(bytes.map(read).transpose()?)
    }

    /// Whether there is an extent of this name and size.
    pub fn has(&self, extent: &Digest, length: u64) -> Result<bool, BucketError> {
        let path = extent.extent_path();
        let found = self.call("look for", &path, self.objects.head(&self.location(&path)))?;
        Ok(found.is_some_and(|found| found.size == length))
    }

    pub fn put_extent(&self, extent: &Digest, bytes: &[u8]) -> Result<(), BucketError> {
        self.put(&extent.extent_path(), bytes.to_vec())
    }

    /// To be called when all extents are there.
    pub fn put_index(&self, id: &Digest, bytes: Vec<u8>) -> Result<(), BucketError> {
        self.put(&id.image_path(), bytes)
    }

    fn put(&self, path: &str, bytes: Vec<u8>) -> Result<(), BucketError> {
        let location = self.location(path);
        let put = self.objects.put(&location, bytes.into());
        let answer = self.call("write", path, put)?;
        answer.map(drop).ok_or_else(|| BucketError::NoBucket {
            url: self.url.clone(),
        })
    }

    /// An object; none if it is not there. One that has more bytes is not read, and has none.
    fn get(&self, path: &str, most: u64) -> Result<Option<Vec<u8>>, BucketError> {
        let location = self.location(path);
        let get = async {
            let found = self.objects.get(&location).await?;
            match found.meta.size > most {
                true => Ok(Vec::new()),
                false => Ok(found.bytes().await?.into()),
            }
        };
        self.call("read", path, get)
    }

    /// The names of a directory's objects that are digests, with their sizes.
    fn list(&self, directory: &str) -> Result<BTreeMap<Digest, u64>, BucketError> {
        let location = self.location(directory);
        let list = self.objects.list(Some(&location));
        let digest = |meta: object_store::ObjectMeta| async move {
            let name = meta.location.filename().and_then(|name| name.parse().ok());
            Ok(name.map(|digest: Digest| (digest, meta.size)))
        };
        let found = self.call("list", directory, list.try_filter_map(digest).try_collect())?;
        Ok(found.unwrap_or_default())
    }

    /// Waits for an answer. None: it is not there.
    fn call<T>(
        &self,
        action: &'static str,
        path: &str,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> Result<Option<T>, BucketError> {
        use object_store::Error::{NotFound, PermissionDenied, Unauthenticated};
        let error = match self.runtime.block_on(request) {
            Ok(answer) => return Ok(Some(answer)),
            Err(NotFound { .. }) => return Ok(None),
            Err(error) => error,
        };
        let object = self.object(path);
        Err(match error {
            PermissionDenied { .. } | Unauthenticated { .. } => BucketError::Denied {
                action,
                object,
                source: Cause(error),
            },
            error => BucketError::Request {
                action,
                object,
                source: Cause(error),
            },
        })
    }

    fn location(&self, path: &str) -> Path {
        let parts = self.prefix.parts();
        let own = Path::from(path);
        parts.chain(own.parts()).collect()
    }

    /// How people name an object.
    fn object(&self, path: &str) -> String {
        format!("{}/{path}", self.url)
    }

    fn missing(&self, kind: &'static str, digest: &Digest) -> BucketError {
        BucketError::Missing {
            url: self.url.clone(),
            id: self.id.clone(),
            kind,
            digest: *digest,
        }
    }
}

impl Origin for Bucket {
    fn place(&self) -> String {
        self.url.clone()
    }

    fn id(&self) -> &str {
        &self.id
    }

    fn threads(&self) -> usize {
        THREADS
    }

    fn images(&self) -> Result<BTreeSet<Digest>, Fault> {
        Ok(self.list(IMAGES)?.into_keys().collect())
    }

    fn extents(&self) -> Result<BTreeMap<Digest, u64>, Fault> {
        Ok(self.list(EXTENTS)?)
    }

    /// firn removes nothing there, so nothing is pinned.
    fn pinned(&self) -> Result<BTreeSet<Digest>, Fault> {
        Ok(BTreeSet::new())
    }

    fn index(&self, id: &Digest) -> Result<(Index, Vec<u8>), Fault> {
        let path = id.image_path();
        let bytes = self.get(&path, Index::MAX_BYTES)?;
        let bytes = bytes.ok_or_else(|| self.missing("index", id))?;
        match Index::from_bytes(&bytes, id) {
            Ok(index) => Ok((index, bytes)),
            Err(source) => Err(BucketError::Index {
                object: self.object(&path),
                source,
            }
            .into()),
        }
    }

    fn read(&self, extent: &Digest, buffer: &mut [u8]) -> Result<(), Fault> {
        let path = extent.extent_path();
        let bytes = self.get(&path, EXTENT as u64)?;
        let bytes = bytes.ok_or_else(|| self.missing("extent", extent))?;
        if bytes.len() != buffer.len() || Digest::of(&bytes) != *extent {
            let object = self.object(&path);
            return Err(BucketError::Extent { object }.into());
        }
        buffer.copy_from_slice(&bytes);
        Ok(())
    }
}
