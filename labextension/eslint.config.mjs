import js from '@eslint/js';
import jupyter from '@jupyter/eslint-plugin';
import prettier from 'eslint-config-prettier';
import tseslint from 'typescript-eslint';

export default tseslint.config(
  { ignores: ['labextension/lib/**', 'labextension/src/generated/**'] },
  js.configs.recommended,
  {
    files: ['labextension/**/*.{ts,tsx}'],
    extends: [...tseslint.configs.recommendedTypeChecked],
    languageOptions: {
      parserOptions: {
        project: './tsconfig.test.json',
        tsconfigRootDir: import.meta.dirname
      }
    },
    rules: {
      '@typescript-eslint/no-explicit-any': 'error',
      '@typescript-eslint/switch-exhaustiveness-check': 'error',
      '@typescript-eslint/naming-convention': [
        'error',
        { selector: 'interface', format: ['PascalCase'], custom: { regex: '^I[A-Z]', match: true } }
      ],
      '@typescript-eslint/no-unused-vars': ['error', { argsIgnorePattern: '^_' }],
      // Lumino's signals take the receiver beside the method.
      '@typescript-eslint/unbound-method': 'off',
      curly: ['error', 'all'],
      eqeqeq: 'error',
      'no-restricted-properties': [
        'error',
        { property: 'innerHTML', message: 'Text from a kernel goes through textContent.' },
        { property: 'outerHTML', message: 'Text from a kernel goes through textContent.' },
        { property: 'insertAdjacentHTML', message: 'Text from a kernel goes through textContent.' }
      ]
    }
  },
  { plugins: { jupyter } },
  ...jupyter.configs.recommended,
  {
    rules: {
      'jupyter/prefer-lazy-imports': 'off'
    }
  },
  {
    // The widget runs outside of JupyterLab too, where there is no translator.
    files: ['labextension/{src/chart,src/model,src/widget,tests}/**'],
    rules: { 'jupyter/no-untranslated-string': 'off' }
  },
  prettier
);
