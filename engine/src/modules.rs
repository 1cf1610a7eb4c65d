//! The modules that a text goes through behind the model, as sentence-transformers lists them beside it. Reads their names and settings;
//! what these mean is for whoever asks.

use serde_json::Value;

use crate::model::{ModelError, ModelSource};

/// The list.
pub(crate) const MODULES_FILE: &str = "modules.json";

/// One of them.
#[derive(Debug)]
pub(crate) struct Module {
    /// Its class, as the file calls it.
    pub(crate) class: String,
    /// The folder of its settings, below the model's.
    path: String,
}

/// All of them in their order; `None` for a model that lists none.
pub(crate) fn open_modules(source: &ModelSource) -> Result<Option<Vec<Module>>, ModelError> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let module = |module: &Value| Module { class: text(&module["type"]), path: text(&module["path"]) };
    let modules = source.json_optional(MODULES_FILE)?;
    Ok(modules.as_array().map(|modules| modules.iter().map(module).collect()))
}

impl Module {
    /// What it is. Newer files name the same class by another path.
    pub(crate) fn kind(&self) -> &str {
        self.class.rsplit('.').next().unwrap_or_default()
    }

    /// The file of its settings.
    pub(crate) fn settings_file(&self) -> String {
        format!("{}/config.json", self.path)
    }

    /// Its settings; `null` for one without. In the cache of fetched models the file's folder is a part of its name.
    pub(crate) fn settings(&self, source: &ModelSource) -> Result<Value, ModelError> {
        match source.json_optional(&self.settings_file())? {
            Value::Null => source.json_optional(&format!("{}-config.json", self.path)),
            settings => Ok(settings),
        }
    }
}

/// What a file says is not what is done here.
pub(crate) fn refused(source: &ModelSource, file: &str, field: &str, problem: String) -> ModelError {
    ModelError::Field { file: source.display(file), field: field.into(), problem }
}
