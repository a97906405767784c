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
use firn_store::{
    Description, Digest, EXTENT, EXTENTS, Form, IMAGES, Index, IndexError, Packing, StoreError,
};
use futures_util::TryStreamExt;
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey};
use object_store::client::ClientConfigKey;
use object_store::path::Path;
use object_store::{BackoffConfig, ObjectStore, ObjectStoreExt, PutMode, PutPayload, RetryConfig};
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
     network; what was copied stays, so the same command continues"
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
    #[error("the memory cannot be compressed or encrypted")]
    #[problem("FIRN-STORE-IO", "see whether this machine has memory left")]
    Pack(#[source] std::io::Error),
    /// Its description is that of something else, or the key is not its own.
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
    /// The random id of the store.
    id: String,
    form: Form,
    objects: Objects,
}

/// What is below a prefix of a bucket, whatever it is.
struct Objects {
    /// As its user names it.
    url: String,
    prefix: Path,
    objects: AmazonS3,
    runtime: Runtime,
}

impl Bucket {
    /// The store there.
    pub fn open(url: &str, packing: &Packing) -> Result<Self, BucketError> {
        let objects = Objects::connect(url)?;
        let found = objects.description()?;
        let description = found.ok_or_else(|| BucketError::Absent {
            url: objects.url.clone(),
        })?;
        Self::described(objects, &description, packing)
    }

    /// The store there, which is made where there is none.
    pub fn create(url: &str, packing: &Packing) -> Result<Self, BucketError> {
        let objects = Objects::connect(url)?;
        let description = match objects.description()? {
            Some(description) => description,
            None => objects.describe(&Description::random(packing)?)?,
        };
        Self::described(objects, &description, packing)
    }

    fn described(
        objects: Objects,
        description: &Description,
        packing: &Packing,
    ) -> Result<Self, BucketError> {
        Ok(Self {
            id: description.id().to_owned(),
            form: description.form(packing, DirPath::new(&objects.url))?,
            objects,
        })
    }

    /// Whether there is an extent, of a size that it may have.
    pub fn has(&self, extent: &Digest, length: u64) -> Result<bool, BucketError> {
        let size = self.objects.size(&self.form.name(extent).extent_path())?;
        Ok(size.is_some_and(|size| self.form.may_hold(size, length)))
    }

    pub fn put_extent(&self, extent: &Digest, bytes: &[u8]) -> Result<(), BucketError> {
        let name = self.form.name(extent);
        let packed = self.form.packed_extent(&name, bytes).map_err(BucketError::Pack)?;
        self.objects.put(&name.extent_path(), packed.into_owned())
    }

    /// To be called when all extents are there.
    pub fn put_index(&self, id: &Digest, bytes: &[u8]) -> Result<(), BucketError> {
        let packed = self.form.packed_index(id, bytes).map_err(BucketError::Pack)?;
        self.objects.put(&id.image_path(), packed.into_owned())
    }

    /// The bytes of an extent that has this name there.
    fn extent(&self, extent: &Digest, name: &Digest) -> Result<Vec<u8>, BucketError> {
        let path = name.extent_path();
        let stored = self.objects.get(&path, self.form.most(EXTENT as u64))?;
        let stored = stored.ok_or_else(|| self.missing("extent", extent))?;
        let bytes = self.form.extent(name, stored);
        bytes.ok_or_else(|| BucketError::Extent {
            object: self.objects.object(&path),
        })
    }

    fn missing(&self, kind: &'static str, digest: &Digest) -> BucketError {
        BucketError::Missing {
            url: self.objects.url.clone(),
            id: self.id.clone(),
            kind,
            digest: *digest,
        }
    }
}

impl Objects {
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

    /// Writes the description where there is none, and returns the one that is there: another push may have
    /// made the store since this one looked.
    fn describe(&self, new: &Description) -> Result<Description, BucketError> {
        use object_store::Error::{AlreadyExists, NotImplemented};
        let path = Description::NAME;
        let location = self.location(path);
        let bytes = PutPayload::from(new.to_bytes(DirPath::new(&self.url))?);
        let put = async {
            let mode = PutMode::Create.into();
            match self.objects.put_opts(&location, bytes.clone(), mode).await {
                Err(AlreadyExists { .. }) => Ok(()),
                // The environment has AWS_CONDITIONAL_PUT=disabled.
                Err(NotImplemented { .. }) => self.objects.put(&location, bytes).await.map(drop),
                written => written.map(drop),
            }
        };
        let written = self.call("write", path, put)?;
        let described = written.map(|()| self.description()).transpose()?.flatten();
        described.ok_or_else(|| BucketError::NoBucket {
            url: self.url.clone(),
        })
    }

    /// Of an object, if it is there.
    fn size(&self, path: &str) -> Result<Option<u64>, BucketError> {
        let found = self.call("look for", path, self.objects.head(&self.location(path)))?;
        Ok(found.map(|found| found.size))
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
            if found.meta.size > most {
                Ok(Vec::new())
            } else {
                Ok(found.bytes().await?.into())
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
}

impl Origin for Bucket {
    fn place(&self) -> String {
        self.objects.url.clone()
    }

    fn id(&self) -> &str {
        &self.id
    }

    fn form(&self) -> &Form {
        &self.form
    }

    fn threads(&self) -> usize {
        THREADS
    }

    fn images(&self) -> Result<BTreeSet<Digest>, Fault> {
        Ok(self.objects.list(IMAGES)?.into_keys().collect())
    }

    fn extents(&self) -> Result<BTreeMap<Digest, u64>, Fault> {
        Ok(self.objects.list(EXTENTS)?)
    }

    /// firn removes nothing there, so nothing is pinned.
    fn pinned(&self) -> Result<BTreeSet<Digest>, Fault> {
        Ok(BTreeSet::new())
    }

    fn index(&self, id: &Digest) -> Result<(Index, Vec<u8>), Fault> {
        let path = id.image_path();
        let stored = self.objects.get(&path, self.form.most(Index::MAX_BYTES))?;
        let stored = stored.ok_or_else(|| self.missing("index", id))?;
        let bytes = self.form.index(id, stored).ok_or(IndexError::Content);
        let index = bytes.and_then(|bytes| Ok((Index::from_bytes(&bytes, id)?, bytes)));
        index.map_err(|source| {
            let object = self.objects.object(&path);
            BucketError::Index { object, source }.into()
        })
    }

    fn read(&self, extent: &Digest, buffer: &mut [u8]) -> Result<(), Fault> {
        let name = self.form.name(extent);
        let bytes = self.extent(extent, &name)?;
        if bytes.len() != buffer.len() {
            let object = self.objects.object(&name.extent_path());
            return Err(BucketError::Extent { object }.into());
        }
        buffer.copy_from_slice(&bytes);
        Ok(())
    }

    fn compare(&self, name: &Digest, _: u64, _: &mut [u8]) -> Result<(), Fault> {
        Ok(self.extent(name, name).map(drop)?)
    }
}
