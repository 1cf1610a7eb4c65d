//! Tasks that follow whoever a fleet names: each begins when it is named and ends when it is not any more.

use std::{
    collections::{HashMap, HashSet},
    hash::Hash,
    sync::Arc,
};

use tokio::{sync::watch, task::JoinHandle};

use crate::fleet::Fleet;

/// Follows each that is `named`, for as long as there are fleets. Who has ended by itself is not begun again while it is named.
pub async fn follow_each<K: Clone + Eq + Hash, F: Future<Output = ()> + Send + 'static>(
    mut fleets: watch::Receiver<Arc<Fleet>>,
    named: impl Fn(&Fleet) -> HashSet<K>,
    follow: impl Fn(K) -> F,
) {
    let mut followed = HashMap::<K, Following>::new();
    loop {
        let named = named(&fleets.borrow_and_update());
        followed.retain(|key, _| named.contains(key));
        for key in named {
            followed.entry(key).or_insert_with_key(|key| Following(tokio::spawn(follow(key.clone()))));
        }
        if fleets.changed().await.is_err() {
            return;
        }
    }
}

/// Ends when it is dropped.
struct Following(JoinHandle<()>);

impl Drop for Following {
    fn drop(&mut self) {
        self.0.abort();
    }
}
